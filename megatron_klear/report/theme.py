"""Colours and style of the report. A chart is drawn in the light colours; the page swaps them for CSS variables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Colour:
    """One role on the page, as #rrggbb for the light and the dark scheme. The light values are all different."""

    name: str
    light: str
    dark: str


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
    Colour("in-range", "#eef0f2", "#272a2f"),
    Colour("clipped-low", "#c5defa", "#1d4470"),
    Colour("clipped-high", "#fcd9b4", "#6b3d0d"),
    Colour("good", "#1b7a3d", "#5fd08a"),
    Colour("bad", "#b3261e", "#ff8a80"),
)
CHART = (SURFACE, INK, MUTED, GRID, *SERIES)


def style_sheet() -> str:
    """The CSS of the report page."""
    light = "".join(f"--{colour.name}:{colour.light};" for colour in (*CHART, *PAGE))
    dark = "".join(f"--{colour.name}:{colour.dark};" for colour in (*CHART, *PAGE))
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
.t{border-radius:3px;padding:1px 0;background:var(--in-range);box-decoration-break:clone;
-webkit-box-decoration-break:clone}
.t.l{background:var(--clipped-low);border-bottom:2px dotted var(--series-1)}
.t.h{background:var(--clipped-high);border-bottom:2px solid var(--series-2)}
.t:hover{outline:1.5px solid var(--ink)}
.eol{color:var(--muted)}
.legend{display:flex;flex-direction:column;gap:4px}
"""
