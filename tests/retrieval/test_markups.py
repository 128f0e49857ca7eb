"""Org, AsciiDoc and LaTeX: what a reader of the printed page sees."""

import pytest

from blend_retrieval.loading import load_bytes


def read(name, text):
    """Title, lines and reasons."""
    (document,), skipped = load_bytes(name, text.encode())
    lines = [line.rstrip() for line in document.text.splitlines() if line.strip()]
    return document.title, lines, {entry.reason for entry in skipped}


ORG = r"""#+TITLE: Harbour rules
#+MACRO: fee $1 crowns
* TODO Fees :money:
:PROPERTIES:
:ID: 7
:END:
The *fee* is {{{fee(31)}}}, see [[https://x.org][the office]] and [[file:pier.png]], at 10:30 =a*b= 2*3*4.
# a comment
| Pier | Fee |
|------+-----|
| A    |  31 |
#+begin_src python
x = 1  # kept
,* no headline
#+end_src
- [X] paid
#+begin_quote
Quoted.
#+end_quote
: fixed
#+INCLUDE: "other.org"
"""


def test_org():
    title, lines, reasons = read("a.org", ORG)
    assert title == "Harbour rules"
    assert lines == [
        "# TODO Fees :money:",
        "The **fee** is 31 crowns, see the office and [picture: pier.png], at 10:30 `a*b` 2*3*4.",
        *("| Pier | Fee |", "| --- | --- |", "| A | 31 |"),
        *("```python", "x = 1  # kept", "* no headline", "```"),
        "- [X] paid",
        "> Quoted.",
        *("```", "fixed", "```"),
    ]
    assert reasons == {
        "is not read",
        "its comments are not read",
        "its drawers (properties, logs) are not read",
        "refers to pictures, which are not read",
    }


ADOC = """= Harbour rules
Anna Orm
:fee: 31
:price: {fee} crowns

// secret
== Fees [[fees]]
The *fee* is {price}, see <<piers,the piers>>, xref:b.adoc[boats] and https://x.org[the office].footnote:[Since 2019.]
{unknown} stays.

.Fees of piers
[cols="1,1,1",options="header"]
|===
|Pier |Summer |Winter

|A
|31
|12
2+|closed |4
.2+|B |5 |6
|7 |8
|===

. First
.. Inner
.. Second inner
. Second
+
Attached.
. Third

A paragraph.

. Anew
[start=4]
. Gate
* [x] paid
* [ ] open

Fee:: 31
NOTE: Closed in winter.

[source,python]
----
x = {fee}  // kept
----

[quote, Anna]
____
Said.
____

,===
a,"b, c"
,===

include::other.adoc[]
image::pier.png[The pier]
ifdef::x[]
More.
endif::[]
"""


def test_asciidoc():
    title, lines, reasons = read("a.adoc", ADOC)
    assert title == "Harbour rules"
    assert lines == [
        *("# Harbour rules", "Anna Orm", "## Fees"),
        "The **fee** is 31 crowns, see the piers, boats and the office. [note: Since 2019.]",
        *("{unknown} stays.", "**Fees of piers**"),
        *("| Pier | Summer | Winter |", "| --- | --- | --- |", "| A | 31 | 12 |", "| closed | closed | 4 |"),
        *("| B | 5 | 6 |", "| B | 7 | 8 |"),
        *("1. First", "   a. Inner", "   b. Second inner", "2. Second", "Attached.", "3. Third", "A paragraph."),
        *("1. Anew", "4. Gate", "- [x] paid", "- [ ] open", "**Fee**: 31", "NOTE: Closed in winter."),
        *("```python", "x = {fee}  // kept", "```", "> Said.", "> — Anna", "| a | b, c |", "| --- | --- |"),
        *("[picture: The pier]", "More."),
    ]
    assert reasons == {
        "is not read",
        "its comments are not read",
        "its conditions (ifdef, ifndef, ifeval) are not followed: all alternatives are read",
        "refers to pictures or films, which are not read",
    }


TEX = r"""\documentclass{article}
\newcommand{\fee}{31}
\newcommand{\pier}[2][north]{the #1 pier #2}
\def\boat#1{boat \emph{#1}}
\title{Harbour \textbf{rules}}\author{Anna \and Orm}
\begin{document}
\maketitle
\section{Fees}\label{sec:fees}\label{unused} % secret
The fee is \fee{} crowns, 12.5\,\% and 31\,000 \& more; \pier{A}, \pier[south]{B}, \boat{Ida}.
M\"uller, na\"{\i}ve, \'Etienne, \c{c}a, stra\ss e, \v{C}apek.
See Section~\ref{sec:fees}\footnote{Since \textit{2019}.} ``quoted'' -- pages 3--5. $E = mc^2 \% $ and \[ a < b \].
\begin{table}\centering\caption{Fees}
\begin{tabular}{lrr}\hline Pier & Summer & Winter \\ \hline A & 31 & 12 \\ \multicolumn{2}{c}{closed} & 4\\[2pt]\end{tabular}
\end{table}
\begin{enumerate}\item First\begin{enumerate}\item Inner \& a\end{enumerate}\item Second\end{enumerate}
\begin{enumerate}[label=Rule \arabic*:,start=4]\item Gate\end{enumerate}
\begin{description}\item[Fee] 31\end{description}
\begin{verbatim}
x = 50 % 7
\section{no}
\end{verbatim}
\input{other.tex}\includegraphics[width=3cm]{pier.png} \SI{31}{\metre}, \unknown{kept}, \href{http://x}{the office}, \verb|a_b|
\end{document}
never shown
"""


def test_latex():
    title, lines, reasons = read("a.tex", TEX)
    assert title == "Harbour rules"
    assert [line.strip() for line in lines] == [
        *("# Harbour **rules**", "Anna, Orm", "## Fees"),
        "[sec:fees] The fee is 31 crowns, 12.5 % and 31 000 & more; the north pier A, the south pier B, boat *Ida*.",
        "Müller, naïve, Étienne, ça, straße, Čapek.",
        r"See Section [sec:fees] [note: Since *2019*.] “quoted” – pages 3–5. $E = mc^2 \% $ and \[ a < b \].",
        "Fees",
        *("| Pier | Summer | Winter |", "| --- | --- | --- |", "| A | 31 | 12 |", "| closed | closed | 4 |"),
        *("1. First", "(a) Inner & a", "2. Second", "Rule 4: Gate", "- **Fee**: 31"),
        *("```", "x = 50 % 7", r"\section{no}", "```"),
        r"[picture: pier.png] 31 metre, \unknown{kept}, the office, `a_b`",
    ]
    assert reasons == {"is not read", "its comments are not read", "refers to pictures, which are not read"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.tex", r"\begin{itemize} \item open {" + "{" * 300 + r"\textbf{x"),
        ("a.tex", r"\newcommand{\a}{\a\a} \a 31"),
        ("a.adoc", "====\n|===\nno end {a"),
        ("a.adoc", "|===\nno cells 31\n|==="),
        ("a.adoc", "|===\n9999999999*|31\n|==="),
        ("a.org", "#+begin_src\nno end\n:PROPERTIES:"),
    ],
)
def test_damaged_texts_end_and_keep_their_words(name, text):
    documents, _ = load_bytes(name, text.encode())
    assert documents
