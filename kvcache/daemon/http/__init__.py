"""Over HTTP: `app` answers, `entry` says who may ask, `history` remembers, `server` listens, `page` is seen."""
