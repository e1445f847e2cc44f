"""Extensions of the Sphinx site: formulas as MathML, the commands, and the figures of scripts."""

import inspect
import re
import textwrap
from typing import Any

import latex2mathml.converter
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator
from sphinx_gallery.scrapers import figure_rst

__all__ = ["figures_of_block", "setup"]

# Inches; wider figures scroll on a phone.
WIDE = 6.5
# Tables with as many columns have a smaller font.
WIDE_COLUMNS = 10
# Cells that are not broken into lines: numbers with errors and units.
NUMBERS = re.compile(r"[-−+±×/|<>≥∞–*%.,:;()\d\s]+")


def _inline(writer: HTML5Translator, node: nodes.math) -> None:
    writer.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def _block(writer: HTML5Translator, node: nodes.math_block) -> None:
    formula = latex2mathml.converter.convert(node.astext(), display="block")
    writer.body.append(f'<div class="formula">{formula}</div>')
    raise nodes.SkipNode


class CommandLine(Directive):
    """Every command with its arguments and options, from the program itself."""

    def run(self) -> list[nodes.Node]:
        import typer

        from kexpfam.cli import app

        lines: list[str] = []
        for name, command in sorted(typer.main.get_command(app).commands.items()):
            lines += [
                f"``kexpfam {name}``",
                "-" * (len(name) + 12),
                "",
                _plain(inspect.cleandoc(command.help or "")),
                "",
            ]
            for parameter in command.params:
                lines += _entry(parameter)
        section = nodes.section()
        self.state.nested_parse(StringList(lines, source="kexpfam.cli"), 0, section, match_titles=True)
        return section.children


def _entry(parameter: Any) -> list[str]:
    """Return one argument or option as an item of a definition list."""
    if getattr(parameter, "hidden", False):
        return []
    shown = (
        str(parameter.name).upper() if parameter.param_type_name == "argument" else ", ".join(parameter.opts)
    )
    return [f"``{shown}``", f"    {_plain(getattr(parameter, 'help', None) or '')}".rstrip() or "    \\", ""]


def _plain(text: str) -> str:
    """Return help without Rich's marks, as text that reStructuredText takes as it stands."""
    text = re.sub(r"\[/?[a-z ]+\]", "", text)
    return re.sub(r"\s+", " ", re.sub(r"([*`|_\\])", r"\\\1", text)) or "No description."


def figures_of_block(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save the new figures of a script's block, made with or without pyplot, and return their markup."""
    names = block_vars["example_globals"]
    found = {id(value): value for value in names.values() if isinstance(value, Figure)}
    saved, width = [], 0.0
    for figure in found.values():
        if not hasattr(figure, "shown_in_gallery"):
            figure.shown_in_gallery = True
            saved.append(next(block_vars["image_path_iterator"]))
            figure.savefig(saved[-1], dpi=110)
            width = max(width, figure.get_figwidth())
    plt.close("all")
    markup = figure_rst(saved, gallery_conf["src_dir"])
    if width <= WIDE:
        return markup
    return f"\n.. container:: wide-figure\n\n{textwrap.indent(markup, '    ')}\n"


def mark_tables(app: Sphinx, page: nodes.document) -> None:
    """Give tables of many columns the class ``wide``, and cells of numbers only the class ``number``."""
    for group in page.findall(nodes.tgroup):
        if int(group["cols"]) >= WIDE_COLUMNS:
            group.parent["classes"].append("wide")
    for cell in page.findall(nodes.entry):
        if NUMBERS.fullmatch(cell.astext()):
            cell["classes"].append("number")


def break_code(app: Sphinx, page: nodes.document) -> None:
    """Let code in the cells of a table break after dots, slashes, underscores and equals signs."""
    for cell in page.findall(nodes.entry):
        for code in cell.findall(nodes.literal):
            parts = re.split(r"(?<=[._/=])(?=\w)", code.astext())
            code.children = []
            for part in parts:
                code += [nodes.raw("", "<wbr>", format="html")] * bool(code.children) + [nodes.Text(part)]


def dash_parameters(app: Sphinx, page: nodes.document) -> None:
    """Write a dash between a parameter and its text."""
    for field in page.findall(nodes.field_body):
        for text in field.findall(lambda node: isinstance(node, nodes.Text) and node.astext() == " -- "):
            text.parent.replace(text, nodes.Text(" – "))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer, the directive and the changes of pages."""
    app.connect("doctree-read", mark_tables)
    app.connect("doctree-read", break_code)
    app.connect("doctree-read", dash_parameters)
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
