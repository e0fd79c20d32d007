"""What people read: tables, progress and pictures."""
