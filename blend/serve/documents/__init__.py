"""Uploads: received, queued, indexed and cached."""
