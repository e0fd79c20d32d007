"""Studies beside the training: robustness, tasks, uncertainty and comparison of networks, and the dose of a scanner.

`qnmixer.evaluate`, `qnmixer.robustness`, `qnmixer.compare` and `qnmixer.calibrate` run them. The wheel has them too.
"""
