"""The weights of a run in one file, and the card beside them."""
