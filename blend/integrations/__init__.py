"""kvblend inside other engines, through their own doors; nothing but entry points imports it."""
