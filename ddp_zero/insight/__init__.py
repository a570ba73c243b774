"""Reports of an optimizer on itself: text, pages, numbers, the flight record, and a check that ranks agree."""
