"""What offline work stands on, by command or over HTTP: records, a journal of what is done, durable files."""
