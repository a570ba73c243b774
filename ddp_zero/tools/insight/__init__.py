"""What an optimizer says of itself: text, pages, numbers, and whether ranks agree."""
