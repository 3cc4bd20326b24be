"""Inspection of compiled programs: `explain`, its `report`, `thunder_report` of thunder's traces, `trace_command`."""
