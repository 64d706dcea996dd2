"""Pictures of recorded runs, reports and models: `chiar figures`."""
