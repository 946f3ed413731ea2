"""The kernel module that counts and times vector-state saves, and what drives it on the board."""
