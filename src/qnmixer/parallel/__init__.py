"""What a run needs of its hardware, put on the network from outside."""
