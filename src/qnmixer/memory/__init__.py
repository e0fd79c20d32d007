"""What happens to the graph of the iterations, and what a step takes: modes, plan, tracker."""
