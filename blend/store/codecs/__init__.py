"""The codecs that come with kvblend, one file each; docs/codecs.md says what each costs. Importing them loads no torch."""
