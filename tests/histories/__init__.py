"""Text transcripts of pure objects: commands, a line of dashes, and the output."""
