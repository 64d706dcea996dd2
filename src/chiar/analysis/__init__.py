"""Tables and pictures from configurations, traces and measurements."""
