"""One run under conditions that it was not trained for."""
