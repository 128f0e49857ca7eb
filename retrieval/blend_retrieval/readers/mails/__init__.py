"""Mails and invitations.

Read `mail` (headers, parts and attachments), then `mail_text` (which version of a text says more) and `events` (invitations).
In: the bytes of a file. Out: Markdown, and the parts of the attachments that can be read.
"""
