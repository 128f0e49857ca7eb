"""Sheets of Excel: a cell reads as a person sees it, in its number format."""

import datetime as dt
import io

import openpyxl
import pytest

from blend_retrieval.loading import load_bytes


def shown(cells, epoch=None):
    """The texts of cells, given as (value, format), read from a workbook; and what was named."""
    book = openpyxl.Workbook()
    if epoch:
        book.epoch = epoch
    sheet = book.active
    sheet.append(["Number", "Value"])
    for number, (value, code) in enumerate(cells, 2):
        sheet.cell(number, 1, f"no. {number}")
        sheet.cell(number, 2, value).number_format = code
    data = io.BytesIO()
    book.save(data)
    (document,), skipped = load_bytes("a.xlsx", data.getvalue())
    lines = document.text.splitlines()[4:]
    return [line.split(" | ")[1].removesuffix(" |") for line in lines], skipped


DAY = dt.datetime(2020, 5, 3, 14, 30)
CASES = {
    "numbers": [
        (0.075, "0.0%", "7.5%"),
        (1, "0%", "100%"),
        (1234, "00000", "01234"),
        (7, "00000-0000", "00000-0007"),
        (123456789, "000-00-0000", "123-45-6789"),
        (1234567, "###-###0", "123-4567"),
        (5551234567, "[<=9999999]###-####;(###) ###-####", "(555) 123-4567"),
        (1234.5, '#,##0.00 "€"', "1,234.50 €"),
        (1234.5, "_-* #,##0.00\\ [$€-407]_-", "1,234.50 €"),
        (-1234.5, '_("$"* #,##0.00_);_("$"* \\(#,##0.00\\);_("$"* "-"??_);_(@_)', "$(1,234.50)"),
        (-1234.5, "[$CHF] #,##0.00", "-CHF 1,234.50"),
        (0, '_("$"* #,##0.00_);_("$"* \\(#,##0.00\\);_("$"* "-"??_);_(@_)', "$-"),
        (0.00001234, "0.00E+00", "1.23E-05"),
        (12345678, "##0.0E+0", "12.3E+6"),
        (9.9999, "0.00E+00", "1.00E+01"),
        (2.25, "# ?/?", "2 1/4"),
        (0.5, "# ?/8", "4/8"),
        (12.345, "# ??/??", "12 10/29"),
        (3, "# ?/?", "3"),
        (1.5, "?/?", "3/2"),
        (0.999, "# ?/?", "1"),
        (0.01, "# ?/?", "0"),
        (1500000, '0.0,,"M"', "1.5M"),
        (12345, '#,##0,"k"', "12k"),
        (2.5, "0", "3"),
        (1.005, "0.00", "1.01"),
        (0.1 + 0.2, "General", "0.3"),
        (1e-7, "General", "0.0000001"),
        (1234567890123, "General", "1234567890123"),
        (31.0, "General", "31"),
        (15, 'General" kg"', "15 kg"),
        (-3, '"Loss "0', "-Loss 3"),
        (5, "@", "5"),
        (12, '0" %"', "12 %"),
    ],
    "sections": [
        (0, '0.00;[Red]-0.00;"-"', "-"),
        (-5, '0.00;[Red]-0.00;"-"', "-5.00"),
        (-5, "#,##0.00;(#,##0.00)", "(5.00)"),
        (-5, "0.00;[Red]0.00", "-5.00"),  # red says that it is negative
        (-5, '[>=100]0.0;[<0]"owes "0.0;0', "owes 5.0"),
        (-5, "[>=100]0.0;0", "-5"),
        (-5, "[<100]0.0;0", "-5.0"),
        (49, "[<>50]0.0;000", "49.0"),
        (50, "[<>50]0.0;000", "050"),
        (50, '[<100]"low";"high"', "low"),
        (1, '"yes";;"no"', "yes"),
        (0, '"yes";;"no"', "no"),
        ("net", '@" weight"', "net weight"),
        ("net", "0.00", "net"),
        (7, '0 "a;b"', "7 a;b"),
        (7, '0\\;0\\"', '0;7"'),
    ],
    "dates": [
        (dt.timedelta(hours=26), "[h]:mm", "26:00"),
        (dt.timedelta(hours=26, minutes=5, seconds=9), "[h]:mm:ss", "26:05:09"),
        (dt.timedelta(minutes=90), "[mm]:ss", "90:00"),
        (DAY, "dd.mm.yyyy", "03.05.2020"),
        (DAY, "m/d/yy h:mm AM/PM", "5/3/20 2:30 PM"),
        (0.5, "h AM/PM", "12 PM"),
        (DAY, "ddd, d-mmm-yyyy", "Sun, 3-May-2020"),
        (DAY, "[$-407]dddd, d. mmmm yyyy", "Sonntag, 3. Mai 2020"),
        (DAY, 'yyyy"-W"', "2020-W"),
        (DAY, '[$-411]ggge"年"m"月"d"日"', "2020年5月3日"),
        (DAY, '[$-411]gggyy"年"', "2020年"),
        (DAY, "d/m/bbbb", "3/5/2563"),
        (DAY, "yyyy\\-mm\\-dd\\Thh:mm:ss", "2020-05-03T14:30:00"),
        (DAY, "mm-dd-yy", "2020-05-03"),  # the file leaves this format to the reader's country
        (dt.time(7, 5, 30), "h:mm", "7:05"),
        (0.5 + 0.25 / 86400, "h:mm:ss.00", "12:00:00.25"),
        (1.99999999, "[h]:mm:ss", "48:00:00"),
        (60, "yyyy-mm-dd", "1900-02-29"),
        (1, "yyyy-mm-dd", "1900-01-01"),
        (-1, "yyyy-mm-dd", "-1"),
        (99999999, "yyyy-mm-dd", "99999999"),
    ],
    "others": [
        (True, "0.00", "TRUE"),
        (False, "General", "FALSE"),
        ("#N/A", "0.00", "#N/A"),
        (5, '0 "days', "5 days"),
        (5, "0.00 EUR", "5.00 EUR"),
        (5, "[nonsense]0.0", "5.0"),
        (5, "hh.000", "5"),  # no format at all
    ],
}


@pytest.mark.parametrize("kind", CASES)
def test_cells_read_as_a_person_sees_them(kind):
    texts, skipped = shown([(value, code) for value, code, _ in CASES[kind]])
    assert not skipped
    assert texts == [right for *_, right in CASES[kind]]


def test_dates_may_count_from_1904():
    from openpyxl.utils.datetime import CALENDAR_MAC_1904

    texts, _ = shown([(DAY, "d.m.yyyy h:mm"), (dt.timedelta(hours=26), "[h]:mm")], CALENDAR_MAC_1904)
    assert texts == ["3.5.2020 14:30", "26:00"]


def test_what_a_format_hides_is_named():
    texts, (skipped,) = shown([(7, ";;;"), ("secret", ";;;"), (0, "0;-0;"), (8, "0")])
    assert texts == ["", "", "", "8"]
    assert skipped.source == "a.xlsx sheet Sheet: B2, B3, B4"
    assert (skipped.reason, skipped.lost) == ("is hidden by its number format", 3)
