"""What every command does: compose its config, check it, run its task, and answer an error in one line."""
