"""What training minimises, and by which steps; the metrics by which images are judged."""
