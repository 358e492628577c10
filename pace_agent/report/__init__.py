"""What a run leaves and shows: live display, metrics, summary, picture. `files.RUN_FOLDER` lists a run folder."""
