"""The daemon's HTTP: `app` authenticates and answers, `server` listens, `page` is the web page."""
