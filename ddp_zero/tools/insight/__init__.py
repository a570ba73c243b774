"""Reports of an optimizer on itself: text, pages, numbers, and a check that ranks agree."""
