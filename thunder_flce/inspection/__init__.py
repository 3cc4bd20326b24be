"""Inspection of compiled programs: `report` (`explain`), `thunder_report` (thunder's programs), `trace_command`."""
