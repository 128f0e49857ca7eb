"""What commands of LaTeX show: accents, signs, and those that show nothing."""

from __future__ import annotations

from unicodedata import normalize

ACCENTS = {
    "`": "\u0300",
    "'": "\u0301",
    "^": "\u0302",
    "~": "\u0303",
    "=": "\u0304",
    "u": "\u0306",
    ".": "\u0307",
    '"': "\u0308",
    "r": "\u030a",
    "H": "\u030b",
    "v": "\u030c",
    "d": "\u0323",
    "c": "\u0327",
    "k": "\u0328",
    "b": "\u0331",
}
_NAMED_SIGNS = r"""
ss ß ae æ AE Æ oe œ OE Œ o ø O Ø l ł L Ł aa å AA Å i ı j ȷ dh ð DH Ð th þ TH Þ dj đ DJ Đ ng ŋ NG Ŋ
ldots … dots … textellipsis … textendash – textemdash — slash / textbackslash \ textasciitilde ~ textasciicircum ^
S § P ¶ dag † ddag ‡ copyright © textcopyright © pounds £ euro € texteuro € EUR € textregistered ® texttrademark ™
textdegree ° degree ° textmu µ textunderscore _ textbar | textless < textgreater > textbraceleft { textbraceright }
textquotedblleft “ textquotedblright ” textquoteleft ‘ textquoteright ’ textquotesingle ' textbullet • textsection §
guillemotleft « guillemotright » flqq « frqq » glqq „ grqq “ textperthousand ‰ textonehalf ½ textonequarter ¼
texttimes × textpm ± checkmark ✓ TeX TeX LaTeX LaTeX LaTeXe LaTeX2e BibTeX BibTeX % % $ $ & & # # _ _ { { } }
"""
_WORDS = _NAMED_SIGNS.split()
_BLANKS = (",", ";", ":", " ", "\n", "quad", "qquad", "enspace", "thinspace", "space", "hfill", "nobreakspace")
_NOTHING = ("!", "/", "-", "@", "relax", "protect", "null", "xspace", "allowbreak")
SIGNS = dict(zip(_WORDS[::2], _WORDS[1::2], strict=True))
SIGNS |= dict.fromkeys(_BLANKS, " ") | dict.fromkeys(_NOTHING, "")
SIGNS |= {"and": ", ", "newline": "\n", "linebreak": "\n", "par": "\n\n"}

# Commands that set how a page looks, by the number of their arguments.
_LOOKS = (
    """
    centering raggedright raggedleft noindent indent bigskip medskip smallskip newpage clearpage cleardoublepage pagebreak
    nopagebreak maketitle tableofcontents listoffigures listoftables frontmatter mainmatter backmatter appendix tiny
    scriptsize footnotesize small normalsize large Large LARGE huge Huge bfseries itshape ttfamily sffamily rmfamily scshape
    upshape mdseries normalfont bf it tt rm sf sc em sl hline toprule midrule bottomrule endhead endfirsthead endfoot
    endlastfoot vfill makeatletter makeatother printindex onehalfspacing doublespacing singlespacing sloppy fussy selectfont
    displaystyle ignorespaces unskip leavevmode nonumber onecolumn twocolumn begingroup endgroup justify strut
    """,
    """
    vspace hspace index pagestyle thispagestyle bibliographystyle usetheme cline cmidrule usepackage documentclass
    hypersetup graphicspath pagenumbering color hyphenation RequirePackage geometry phantom hphantom vphantom linespread
    usetikzlibrary lstset sisetup captionsetup stepcounter refstepcounter newcounter AtBeginDocument setlist selectlanguage
    setmainlanguage setmainfont nocite
    """,
    "setlength addtolength setcounter addtocounter newtheorem fontsize markboth setbeamertemplate setbeamercolor rule",
    "addcontentsline definecolor newenvironment renewenvironment",
)
SILENT = {name: count for count, names in enumerate(_LOOKS) for name in names.split()}


def accented(accent: str, letter: str) -> str:
    """A letter with an accent, such as "ü" for `"` and "u"."""
    base = {"ı": "i", "ȷ": "j"}.get(letter, letter) or " "
    return normalize("NFC", base[0] + ACCENTS[accent] + base[1:])
