"""Word files: raised, lowered, struck-through and hidden text, and texts of pictures."""

import io
import zipfile

import pytest
from office_files import zipped_files
from test_word import lines, read, word_file

from blend_retrieval.loading import load_bytes

_PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_DRAWING = "http://schemas.openxmlformats.org/drawingml/2006"
_SPACES = (
    f'xmlns:wp="{_DRAWING}/wordprocessingDrawing" xmlns:a="{_DRAWING}/main" xmlns:pic="{_DRAWING}/picture" '
    'xmlns:adec="http://schemas.microsoft.com/office/drawing/2017/decorative"'
)
STYLES = "".join(
    f'<w:style w:type="character" w:styleId="{name}"><w:basedOn w:val="{base}"/><w:rPr>{look}</w:rPr></w:style>'
    for name, base, look in (
        ("Power", "", '<w:vertAlign w:val="superscript"/>'),
        ("Bold", "Power", "<w:b/>"),
        ("Old", "", "<w:dstrike/>"),
        ("Secret", "", "<w:vanish/>"),
        ("Round", "Round", ""),
    )
)


def run(text, look="", style=""):
    named = f'<w:rStyle w:val="{style}"/>' if style else ""
    return f'<w:r><w:rPr>{named}{look}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (run("10") + run("6", '<w:vertAlign w:val="superscript"/>'), "10^6^"),
        (run("10") + run("6", style="Power"), "10^6^"),
        (run("10") + run("6", style="Bold"), "10^6^"),
        (run("10") + run("6", '<w:vertAlign w:val="baseline"/>', "Power"), "106"),
        (run("10") + run("6", '<w:position w:val="8"/>'), "10^6^"),
        (run("H") + run("2", '<w:position w:val="-6"/>') + run("O"), "H~2~O"),
        (run("98", "<w:dstrike/>") + run(" 31"), "~~98~~ 31"),
        (run("98", style="Old") + run(" 31", '<w:dstrike w:val="0"/>', "Old"), "~~98~~ 31"),
        (run("31", style="Round") + run("9", style="Secret"), "31"),
    ],
)
def test_text_keeps_its_value(content, shown):
    text, reasons = read(f"<w:p>{content}</w:p>", styles=STYLES)
    assert text.replace("**", "") == shown
    assert reasons == (["its hidden text is not read"] if "Secret" in content else [])


@pytest.mark.parametrize(("style", "shown"), [("Old", "~~98 98~~"), ("Secret", ""), ("Round", "98 98")])
def test_looks_by_the_style_of_the_paragraph(style, shown):
    content = f'<w:p><w:pPr><w:pStyle w:val="{style}"/></w:pPr>{run("98 ")}{run("98")}</w:p>'
    text, _ = read(f"{content}<w:p>{run('31')}</w:p>", styles=STYLES)
    assert lines(text) == [*filter(None, [shown]), "31"]


def test_comments_and_headers_keep_their_values():
    power = run("10") + run("1", style="Power") + run("2", style="Power") + run(" m, not ") + run("98", style="Old")
    comment = f'<w:comment w:id="3" w:author=""><w:p>{power}</w:p></w:comment>'
    section = '<w:sectPr><w:headerReference w:type="default" r:id="header"/></w:sectPr>'
    body = f"<w:p>{run('Fee')}<w:r><w:commentReference w:id='3'/></w:r></w:p>{section}"
    text, _ = read(body, header=f"<w:p>{power}</w:p>", comments=comment, styles=STYLES)
    assert lines(text) == ["10^12^ m, not ~~98~~", "Fee [comment: 10^12^ m, not ~~98~~]"]


def drawing(attributes, inside="", more=""):
    return (
        f'<w:drawing {_SPACES}><wp:inline><wp:docPr id="1" name="Picture 1" {attributes}>{more}</wp:docPr>'
        f'{inside}<pic:pic><pic:cNvPr id="1" name="mast.png" descr="mast.png"/><a:blip/></pic:pic></wp:inline></w:drawing>'
    )


ALT = 'descr="Mast at Orm, 31 cm"'
DECORATIVE = '<a:extLst><a:ext uri="x"><adec:decorative val="1"/></a:ext></a:extLst>'
SHOWN = "Before [picture: Mast at Orm, 31 cm] behind"
SHAPE = '<v:shape alt="Mast at Orm, 31 cm"/>'
CHOICE = f"<mc:Choice Requires='wpg'>{drawing(ALT)}</mc:Choice><mc:Fallback>%s</mc:Fallback>"
CHOICE = f"<mc:AlternateContent>{CHOICE}</mc:AlternateContent>"


@pytest.mark.parametrize(
    ("picture", "shown"),
    [
        (drawing(ALT), SHOWN),
        (drawing(ALT, inside=f'<pic:cNvPr name="" {ALT}/>'), SHOWN),
        (drawing('descr=""'), "Before behind"),
        (drawing('descr="mast 2.jpeg"'), "Before behind"),
        (drawing('descr="Picture 1"'), "Before behind"),
        (drawing(ALT, more=DECORATIVE), "Before behind"),
        (f"<w:pict>{SHAPE}</w:pict>", SHOWN),
        (f"<w:object>{SHAPE}</w:object>", SHOWN),
        (CHOICE % f"<w:pict>{SHAPE}</w:pict>", SHOWN),
        (CHOICE % "<w:pict><v:shape/></w:pict>", SHOWN),
        (
            f"{drawing(ALT)}</w:r><w:r>{drawing(ALT)}",
            "Before [picture: Mast at Orm, 31 cm][picture: Mast at Orm, 31 cm] behind",
        ),
    ],
)
def test_texts_of_pictures(picture, shown):
    text, _ = read(f"<w:p>{run('Before ')}<w:r>{picture}</w:r>{run(' behind')}</w:p>")
    assert " ".join(text.split()) == shown


def test_the_text_of_a_picture_that_is_there_stands_once():
    picture = "<pic:pic><pic:blipFill><a:blip r:embed='r1'/></pic:blipFill></pic:pic>"
    graphic = f"<a:graphic><a:graphicData>{picture}</a:graphicData></a:graphic>"
    body = f"<w:p><w:r>{drawing(ALT, inside=graphic)}</w:r></w:p>"
    relation = f'<Relationship Id="r1" Type="{_OFFICE}/image" Target="media/a.png"/>'
    links = f'<Relationships xmlns="{_PACKAGE}">{relation}</Relationships>'
    data = io.BytesIO(word_file(body))
    with zipfile.ZipFile(data) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files |= {"word/_rels/document.xml.rels": links, "word/media/a.png": b"pixels"}
    (document,), _ = load_bytes("a.docx", zipped_files(files))
    assert document.text == "[picture: Mast at Orm, 31 cm]"


def test_the_text_of_a_shape_stands_before_its_box():
    inner = f"<w:p>{run('In the box.')}<w:r>{drawing(ALT)}</w:r></w:p>"
    box = f"<wps:wsp><wps:txbx><w:txbxContent>{inner}</w:txbxContent></wps:txbx></wps:wsp>"
    sign = drawing('descr="Sign"', inside=box)
    text, _ = read(f"<w:p>{run('Before.')}<w:r>{sign}</w:r></w:p>")
    assert lines(text) == ["Before.[picture: Sign]", "In the box.[picture: Mast at Orm, 31 cm]"]
