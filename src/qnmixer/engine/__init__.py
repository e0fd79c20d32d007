"""What a run needs and a user need not read: data, memory, devices, runs, evaluation."""
