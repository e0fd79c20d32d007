"""What trains and evaluates without: public data sets, the comparison of methods, model cards."""
