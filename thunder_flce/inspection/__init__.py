"""Looking at what was compiled: `report` (explain), `saved` (for backward), `fusions` (nvFuser), `trace_command`."""
