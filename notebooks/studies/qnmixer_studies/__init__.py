"""Studies of trained networks, beside the training: robustness, tasks, uncertainty and comparison of methods.

`qnmixer.evaluate`, `qnmixer.robustness` and `qnmixer.compare` run them. The wheel has this package too.
"""
