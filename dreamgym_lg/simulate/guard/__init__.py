"""What stops the real world while a dreamed episode runs."""
