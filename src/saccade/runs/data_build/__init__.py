"""Make tasks and demonstrations from videos with a teacher: `saccade data build`."""
