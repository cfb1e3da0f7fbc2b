"""Colours and style of the report. A chart is drawn in the light colours; the page swaps them for CSS variables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Colour:
    """One role on the page, as #rrggbb for the light and the dark scheme. The light values are all different."""

    name: str
    light: str
    dark: str


@dataclass(frozen=True, slots=True)
class Shade:
    """Background of a token: on the page in the light and the dark scheme, and on the terminal.

    `terminal` is an index of the 256 colours that bears black text; None leaves the terminal's own colours.
    """

    light: str
    dark: str
    terminal: int | None


PLAIN = Shade("#eef0f2", "#272a2f", None)
LOW, LOWER, LOWEST = (
    Shade("#d6e7fb", "#213650", 153),
    Shade("#b4d4f7", "#1d4470", 117),
    Shade("#8dbdf2", "#1f5591", 75),
)
HIGH, HIGHER, HIGHEST = (
    Shade("#fde6cd", "#4a341f", 223),
    Shade("#fbcb9b", "#6b3d0d", 216),
    Shade("#f5a962", "#8a4d08", 208),
)
# "heat" goes from unremarkable to remarkable, "diverging" from low over plain to high, "names" has no order.
PALETTES = {
    "heat": (
        PLAIN,
        Shade("#fff3c4", "#45401f", 230),
        Shade("#ffdf95", "#5c4a16", 222),
        Shade("#ffc078", "#70470f", 216),
        Shade("#ff9b73", "#7d3a14", 209),
        Shade("#f7787a", "#8a2626", 203),
    ),
    "diverging": (LOWEST, LOWER, LOW, PLAIN, HIGH, HIGHER, HIGHEST),
    "clip": (PLAIN, LOWER, HIGHER),
    "names": (
        Shade("#cfe3f7", "#1d4470", 153),
        Shade("#fcd9b4", "#6b3d0d", 223),
        Shade("#c3ecdd", "#0f4f40", 158),
        Shade("#f0d2e6", "#5f2a4f", 219),
        Shade("#efe3a6", "#574a08", 229),
        Shade("#d9d5f5", "#3c3775", 147),
        Shade("#f7cfcb", "#6b2522", 217),
        Shade("#d5dadf", "#454b52", 250),
    ),
}

SURFACE = Colour("surface", "#fffffe", "#1c1e21")
INK = Colour("ink", "#22262b", "#e6e7e9")
MUTED = Colour("muted", "#646b75", "#9da4ae")
GRID = Colour("grid", "#e2e5e9", "#33373d")
# Six hues that stay apart for colour-blind readers (after Okabe and Ito), lightness set for each scheme.
SERIES = (
    Colour("series-1", "#0b6cb3", "#5aaeea"),
    Colour("series-2", "#d15a00", "#ff9448"),
    Colour("series-3", "#00866b", "#35c8a4"),
    Colour("series-4", "#a8478a", "#e08cc4"),
    Colour("series-5", "#8a7100", "#d9bc3a"),
    Colour("series-6", "#5b53b5", "#a49df2"),
)
PAGE = (
    Colour("page", "#f5f6f8", "#131517"),
    Colour("good", "#1b7a3d", "#5fd08a"),
    Colour("bad", "#b3261e", "#ff8a80"),
)
CHART = (SURFACE, INK, MUTED, GRID, *SERIES)


def style_sheet() -> str:
    """The CSS of the report page."""
    shades = [
        Colour(f"{palette}-{level}", shade.light, shade.dark)
        for palette, row in PALETTES.items()
        for level, shade in enumerate(row)
    ]
    light = "".join(f"--{colour.name}:{colour.light};" for colour in (*CHART, *PAGE, *shades))
    dark = "".join(f"--{colour.name}:{colour.dark};" for colour in (*CHART, *PAGE, *shades))
    schemes = f":root{{color-scheme:light dark;{light}}}\n@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return f"{schemes}\n{_RULES}"


def use_variables(svg: str) -> str:
    """Replace the light chart colours of an SVG by CSS variables, so that it follows the scheme of the page."""
    for colour in CHART:
        svg = svg.replace(colour.light, f"var(--{colour.name})")
    return svg


_RULES = """\
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:26px;margin:0 0 4px}
h2{font-size:19px;margin:36px 0 10px}
h3{font-size:16px;margin:22px 0 8px}
p{margin:6px 0}
.muted{color:var(--muted)}
.card{background:var(--surface);border:1px solid var(--grid);border-radius:8px;padding:14px 16px;
margin:10px 0;overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:5px 14px 5px 0;text-align:left;border-bottom:1px solid var(--grid);vertical-align:top}
th{color:var(--muted);font-weight:600;font-size:13px}
td.number,th.number{text-align:right}
tr:last-child td{border-bottom:0}
.share{display:inline-block;height:10px;border-radius:2px;background:var(--series-1);vertical-align:middle;margin-right:8px}
.curves svg{width:100%;min-width:860px;height:auto;display:block}
.curves svg text{font-family:system-ui,"Segoe UI","DejaVu Sans",sans-serif!important}
details{margin:6px 0}
summary{cursor:pointer}
details.sample{background:var(--surface);border:1px solid var(--grid);border-radius:8px;margin:8px 0;padding:8px 14px}
details.sample>summary{display:list-item;font-variant-numeric:tabular-nums}
summary .fact{margin-left:14px}
.good{color:var(--good);font-weight:600}
.bad{color:var(--bad);font-weight:600}
pre,.tokens{font:13px/1.75 ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;white-space:pre-wrap;
overflow-wrap:anywhere;margin:4px 0 10px}
pre{line-height:1.5}
.label{color:var(--muted);font-size:12px;font-weight:600;margin-top:8px}
.t{border-radius:3px;padding:1px 0;background:var(--heat-0);box-decoration-break:clone;
-webkit-box-decoration-break:clone}
.t:hover{outline:1.5px solid var(--ink)}
.eol{opacity:.7}
.by{margin:0 4px 0 0}
.by+label{margin-right:16px;cursor:pointer}
.scale{display:none;flex-wrap:wrap;gap:6px 14px;align-items:baseline}
.scale p{flex-basis:100%}
.scale .t{padding:1px 6px}
"""
