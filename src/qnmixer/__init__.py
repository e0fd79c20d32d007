"""QN-Mixer for sparse-view CT reconstruction (kept empty of imports: `--help` must not load torch)."""
