"""Looking at what was compiled: `report` (explain), `thunder_report` (what thunder saves), `trace_command`."""
