"""Looking at what was compiled: `report` (explain), what is saved and what nvFuser runs in it, `trace_command`."""
