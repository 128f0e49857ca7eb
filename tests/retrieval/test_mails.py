"""Mails: the text that says most, whatever parts a program divides it into, and a word on every part that is not read."""

import base64

import pytest

from blend_retrieval.loading import load_bytes

HEADERS = "From: gate@orm.example\nSubject: Gate\nMIME-Version: 1.0\n"
PLAIN, HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"


def part(kind, text, *headers):
    lines = [f"Content-Type: {kind}", *headers, "", text]
    return "\n".join(lines)


def multipart(kind, *parts, headers=""):
    boundary = f"={kind}-{len(parts)}="
    inner = "".join(f"--{boundary}\n{part}\n" for part in parts)
    return f'{headers}Content-Type: multipart/{kind}; boundary="{boundary}"\n\n{inner}--{boundary}--\n'


def read(body):
    """The texts by id, without headers, and the reasons by place."""
    data = body if isinstance(body, bytes) else body.encode()
    documents, skipped = load_bytes("a.eml", HEADERS.encode() + data)
    texts = {document.id: document.text.removeprefix("From: gate@orm.example\n\n") for document in documents}
    return texts, {fault.source: fault.reason for fault in skipped}


def mail_text(body):
    texts, skipped = read(body)
    assert not skipped
    return texts["a.eml"]


CODE = part(HTML, "<p>The gate code is <b>4417</b>.</p>")


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        ("", "The gate code is **4417**."),
        (" \u00a0\n\u200b\n ", "The gate code is **4417**."),
        ("The gate code is 4417.", "The gate code is 4417."),
        (
            "The gate code is 4417.\nhttps://orm.example/gate?id=99",
            "The gate code is 4417.\nhttps://orm.example/gate?id=99",
        ),
        ("The gate code is: see below.", "The gate code is: see below.\n\nThe gate code is **4417**."),
        ("The gate code is", "The gate code is **4417**."),
        ("Please view this message as HTML.", "Please view this message as HTML.\n\nThe gate code is **4417**."),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_the_version_that_says_more(plain, text, is_first):
    versions = [part(PLAIN, plain), CODE] if is_first else [CODE, part(PLAIN, plain)]
    assert mail_text(multipart("alternative", *versions)) == text


NAMED = part(f"{HTML}; name=body.html", "<p>The gate code is <b>4417</b>.</p>", "Content-Disposition: inline")
PICTURE = part(
    "image/png", "iVBORw0KGgo=", "Content-Transfer-Encoding: base64", "Content-Disposition: inline; filename=p.png"
)


@pytest.mark.parametrize(
    "body",
    [
        multipart("related", CODE, PICTURE),
        multipart("related", multipart("alternative", part(PLAIN, " "), CODE), PICTURE),
        multipart("alternative", part(PLAIN, ""), multipart("related", CODE, PICTURE)),
        multipart("mixed", multipart("alternative", part(PLAIN, ""), multipart("mixed", CODE, PICTURE))),
        multipart("mixed", PICTURE, CODE),
        multipart("alternative", part(PLAIN, ""), multipart("related", NAMED, PICTURE)),
        multipart("related", NAMED, PICTURE),
        multipart("mixed", PICTURE, part("application/xhtml+xml", "<p>The gate code is <b>4417</b>.</p>")),
        multipart("signed", multipart("mixed", CODE, PICTURE)),
        multipart("made-up", CODE, PICTURE),
    ],
)
def test_every_nesting_gives_the_text_and_names_the_picture(body):
    texts, skipped = read(body)
    assert texts == {"a.eml": "The gate code is **4417**."}
    assert skipped == {"a.eml p.png": "is a picture, which is not read"}


def test_texts_between_attachments_come_in_order():
    body = multipart(
        "mixed", part(PLAIN, "The plan:"), PICTURE, part(PLAIN, "The code is 4417."), part(HTML, "<i>Orm</i>")
    )
    texts, _ = read(body)
    assert texts == {"a.eml": "The plan:\n\nThe code is 4417.\n\n*Orm*"}


def test_flowed_paragraphs_are_joined_and_other_lines_are_not():
    flowed = "The fee \nis 31 \ncrowns.\n> It was \n> 12.\n>> Before.\n From here\n-- \nOrm"
    assert mail_text(part(f"{PLAIN}; format=flowed", flowed)) == (
        "The fee is 31 crowns.\n> It was 12.\n>> Before.\nFrom here\n-- \nOrm"
    )
    assert mail_text(part(f"{PLAIN}; format=flowed; delsp=yes", "31 \n7 \n days\nx")) == "317days\nx"
    assert mail_text(part(PLAIN, "31 \n12")) == "31 \n12"


FEE = "Плата - 31 крона, причал открыт."


@pytest.mark.parametrize(
    ("charset", "codec"), [("koi8-r", "koi8-r"), ("us-ascii", "utf-8"), ("utf-8", "utf-8"), ("x-odd", "utf-8")]
)
@pytest.mark.parametrize("kind", ["plain", "html", "calendar"])
def test_charsets(charset, codec, kind):
    words = {"calendar": f"BEGIN:VCALENDAR\nBEGIN:VEVENT\nSUMMARY:{FEE}\nEND:VEVENT\nEND:VCALENDAR"}.get(kind, FEE)
    body = part(f"text/{kind}; charset={charset}", "").encode() + words.encode(codec)
    assert mail_text(body).removeprefix("Summary: ") == FEE


def attached(name):
    return "Content-Transfer-Encoding: base64", f"Content-Disposition: attachment; filename={name}"


def test_attached_texts_are_read_in_their_charset():
    html = f'<meta charset="iso-8859-1"><p>{FEE}</p>'
    parts = [
        part("text/plain; charset=koi8-r", base64.b64encode(FEE.encode("koi8-r")).decode(), *attached("fee.txt")),
        part("text/html; charset=koi8-r", base64.b64encode(html.encode("koi8-r")).decode(), *attached("fee.html")),
    ]
    texts, skipped = read(multipart("mixed", part(PLAIN, "Both."), *parts))
    assert texts == {"a.eml": "Both.", "a.eml#fee.txt": FEE, "a.eml#fee.html": FEE}
    assert not skipped


def test_a_text_that_cannot_be_decoded_takes_nothing_with_it():
    broken = part(PLAIN, base64.b64encode(b"\0\1\2\3" * 9).decode(), "Content-Transfer-Encoding: base64")
    texts, skipped = read(multipart("mixed", broken, part(PLAIN, "The code is 4417.")))
    assert texts == {"a.eml": "The code is 4417."}
    assert skipped == {"a.eml text": "is a binary file, not text"}


EVENT = """BEGIN:VCALENDAR
METHOD:REQUEST
BEGIN:VTIMEZONE
TZID:Europe/Oslo
BEGIN:STANDARD
DTSTART:19701025T030000
END:STANDARD
END:VTIMEZONE
BEGIN:VEVENT
UID:77@orm.example
DTSTAMP:20261101T000000Z
SUMMARY:Gate test\\, north
DTSTART;TZID=Europe/Oslo:20261103T093000
DTEND:20261103T100015Z
LOCATION:Pier 7\\nOrm
ORGANIZER;CN="Hafn, Ida":mailto:ida@orm.example
ATTENDEE;PARTSTAT=NEEDS-ACTION;CN=
 Bo:MAILTO:bo@orm.example
EXDATE;VALUE=DATE:20261110,20261117
DESCRIPTION:
X-ODD:none
BEGIN:VALARM
TRIGGER:-PT15M
END:VALARM
RRULE:FREQ=WEEKLY;COUNT=3
END:VEVENT
BEGIN:VTODO
SUMMARY:Grease
DUE;VALUE=DATE:20261201
END:VTODO
END:VCALENDAR"""
LINES = [
    "Calendar: request",
    "",
    "Summary: Gate test, north",
    "Start: 2026-11-03 09:30 Europe/Oslo (20261103T093000)",
    "End: 2026-11-03 10:00:15 UTC (20261103T100015Z)",
    "Location: Pier 7",
    "Orm",
    "Organizer: Hafn, Ida <ida@orm.example>",
    "Attendee: Bo <bo@orm.example> (needs action)",
    "Except on: 2026-11-10 (20261110), 2026-11-17 (20261117)",
    "Repeats: FREQ=WEEKLY;COUNT=3",
    "",
    "Summary: Grease",
    "Due: 2026-12-01 (20261201)",
]


def test_lines_that_a_program_did_not_fold():
    calendar = """BEGIN:VCALENDAR
METHOD:PUBLISH
X-WR-CALNAME:Harbour\\, north
NAME:Harbour\\, north
X-WR-CALDESC:Tests of
 the gates
BEGIN:VEVENT
DESCRIPTION:Bring the key.
The code is 4417

Ring at gate 3\\nor 4
X-ALT-DESC;FMTTYPE=text/html:<p>Bring
the key</p>
SUMMARY:Gate test
END:VEVENT
and this is nobody's
END:VCALENDAR"""
    assert mail_text(part("text/calendar", calendar)).splitlines() == [
        *("Calendar: publish", "Name: Harbour, north", "Description: Tests ofthe gates", ""),
        *("Description: Bring the key.", "The code is 4417", "Ring at gate 3", "or 4", "Summary: Gate test"),
    ]


def test_invitations():
    invitation = part("text/calendar; method=REQUEST; charset=utf-8", EVENT)
    alone = mail_text(invitation)
    assert alone.splitlines() == LINES
    beside = multipart(
        "alternative", part(PLAIN, "You are invited."), part(HTML, "<p>You are invited.</p>"), invitation
    )
    assert mail_text(beside) == f"You are invited.\n\n{alone}"
    file = part(
        "application/octet-stream", base64.b64encode(EVENT.replace("\n", "\r\n").encode()).decode(), *attached("a.ics")
    )
    texts, _ = read(multipart("mixed", part(PLAIN, "See the file."), file))
    assert texts == {"a.eml": "See the file.", "a.eml#a.ics": alone}


@pytest.mark.parametrize(
    ("body", "place", "reason"),
    [
        (
            part("application/pkcs7-mime; smime-type=enveloped-data; name=smime.p7m", "AAAA"),
            "smime.p7m",
            "is encrypted",
        ),
        (part("application/x-pkcs7-mime; name=smime.p7m", "AAAA"), "smime.p7m", "is encrypted"),
        (
            part("application/pkcs7-mime; smime-type=signed-data; name=smime.p7m", "AAAA"),
            "smime.p7m",
            "is signed in an S/MIME",
        ),
        (multipart("encrypted", part("application/octet-stream", "x")), "text", "is encrypted (PGP)"),
        (
            part(PLAIN, "Hi.\n-----BEGIN PGP MESSAGE-----\n\nhQEM\n-----END PGP MESSAGE-----"),
            "text",
            "is encrypted (PGP)",
        ),
        (
            part("application/ms-tnef", "eJ8+", "Content-Disposition: attachment; filename=winmail.dat"),
            "winmail.dat",
            "is in Outlook",
        ),
        (part("application/octet-stream; name=winmail.dat", "eJ8+"), "winmail.dat", "is in Outlook's own format"),
        (part("audio/wav; name=call.wav", "AAAA"), "call.wav", "is a recording"),
        (part("application/pgp-signature; name=s.asc", "AAAA"), "s.asc", "is a signature"),
        (part("application/x-odd", "AAAA"), "attachment 1", "is an attachment of a kind that is not read"),
        (
            part("message/external-body; name=fee.txt; access-type=ftp", "Content-Type: text/plain\n\n"),
            "fee.txt",
            "is only named",
        ),
        (part(PLAIN, "AAAA", "Content-Transfer-Encoding: x-yenc"), "text", "is in a transfer encoding"),
    ],
)
def test_what_is_not_read_is_named(body, place, reason):
    texts, skipped = read(body)
    assert texts["a.eml"] in ("From: gate@orm.example", "Hi.")
    assert skipped[f"a.eml {place}"].startswith(reason)


def test_attachments_of_one_name_and_without_a_suffix():
    plain = [
        part("text/plain", words, "Content-Disposition: attachment; filename=fee.txt")
        for words in ("North 31", "South 12")
    ]
    table = part("text/csv", "Pier,Fee\nA,31", "Content-Disposition: attachment")
    other = part("text/x-diff; name=PATCH", "-31\n+12")
    unknown = part("application/octet-stream; name=LICENSE", "Free for 31 days.")
    texts, skipped = read(multipart("mixed", part(PLAIN, "All."), *plain, table, other, unknown))
    assert not skipped
    assert texts == {
        "a.eml": "All.",
        "a.eml#fee.txt": "North 31",
        "a.eml#fee (2).txt": "South 12",
        "a.eml#attachment 3": "| Pier | Fee |\n| --- | --- |\n| A | 31 |",
        "a.eml#PATCH": "-31\n+12",
        "a.eml#LICENSE": "Free for 31 days.",
    }


def test_forwarded_mails_and_reports_of_servers():
    inner = f"To: crew@orm.example\nSubject: Fee\n{part(PLAIN, 'It is 31.')}"
    forwarded = part("message/rfc822", inner)
    coded = part("message/rfc822", base64.b64encode(inner.encode()).decode(), "Content-Transfer-Encoding: base64")
    only_says_so = part("message/rfc822", inner.replace("31.", "=31."), "Content-Transfer-Encoding: quoted-printable")
    report = part(
        "message/delivery-status", "Reporting-MTA: dns; orm.example\n\nFinal-Recipient: bo@orm.example\nStatus: 5.1.1"
    )
    texts, skipped = read(multipart("report", part(PLAIN, "Not delivered."), report, forwarded, coded, only_says_so))
    assert not skipped
    lines = [
        "Not delivered.",
        "",
        "Reporting-MTA: dns; orm.example",
        "",
        "Final-Recipient: bo@orm.example",
        "Status: 5.1.1",
    ]
    assert texts["a.eml"].splitlines() == lines
    assert texts["a.eml#attachment 1"] == texts["a.eml#attachment 2"] == "To: crew@orm.example\n\nIt is 31."
    assert texts["a.eml#attachment 3"].endswith("It is =31.")


def test_headers_that_come_twice_or_broken():
    data = b"To: a@orm.example\nTo: b@orm.example\nDate: someday\nCc: =?utf-8?q?J=C3=A6?= <>\nFrom: J\xf8rn\n"
    body = b"Content-Type: text/plain; charset=iso-8859-1\n\nHi."
    documents, skipped = load_bytes("a.eml", data + body)
    assert not skipped
    lines = ["From: Jørn", "To: a@orm.example, b@orm.example", "Cc: Jæ <>", "Date: someday", "", "Hi."]
    assert documents[0].text.splitlines() == lines
    _, (skipped,) = load_bytes("a.eml", data + b"\nHi.")
    assert (skipped.source, skipped.reason) == ("a.eml header From", "holds bytes of no known encoding")
