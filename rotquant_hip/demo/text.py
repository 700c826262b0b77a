# SPDX-License-Identifier: MIT
"""Wikipedia articles (2016 dump, CC BY-SA) from gensim's test data, cut into token windows."""

from __future__ import annotations

import bz2
import html
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rotquant_hip.demo.packages import TEXT, DemoError, find_file

NAME = "English Wikipedia, 2016 (gensim test data)"
DUMP = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
WINDOW = 512  # tokens; each window is its own context

_NOT_PROSE = re.compile(r"\s*#redirect|.*\{\{(?:disambig|hndis|geodis)", re.S | re.I)
_INNERMOST_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}")
_MEDIA = re.compile(r"\[\[(?:file|image|category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", re.I)
# In this order: a reference may hold templates and links, a link may hold markup.
_SUBSTITUTIONS = [
    (re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]"), r"\1"),  # [[target|label]] -> label
    (re.compile(r"\[https?://\S+(?:\s+([^\]]*))?\]"), r"\1"),
    (re.compile(r"<(math|gallery|timeline|table)\b.*?</\1>", re.S | re.I), ""),
    (re.compile(r"<[^>]*>"), ""),
    (re.compile(r"'{2,}"), ""),
    (re.compile(r"^[*#:;]+\s*", re.M), ""),
    (re.compile(r"^=+\s*(.*?)\s*=+\s*$", re.M), r"\1"),
    (re.compile(r"\([\s,;]*\)"), ""),  # what a removed pronunciation leaves behind
    (re.compile(r"[ \t\u00a0]+"), " "),
    (re.compile(r" +([,.;])"), r"\1"),
    (re.compile(r" *\n\s*"), "\n"),
]


def clean(wikitext: str) -> str:
    """Plain prose of one article: no references, templates, tables, media or markup."""
    text = re.sub(r"<!--.*?-->", "", wikitext, flags=re.S)
    text = re.sub(r"<ref\b[^>]*/>|<ref\b.*?</ref>", "", text, flags=re.S | re.I)
    found = 1
    while found:  # innermost first: templates nest
        text, found = _INNERMOST_TEMPLATE.subn("", text)
    text = html.unescape(_MEDIA.sub("", text))
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    return text.strip()


def articles(path: Path) -> Iterator[str]:
    """Wikitext of every article of the dump, in its order.

    Left out: redirects, lists of what a word may mean, pages that are no articles.
    """
    with bz2.open(path) as file:
        for _, element in ElementTree.iterparse(file):
            if not element.tag.endswith("}page"):
                continue
            space = element.tag.removesuffix("page")
            text = element.findtext(f"{space}revision/{space}text") or ""
            is_article = element.findtext(f"{space}ns") == "0"
            element.clear()
            if is_article and not _NOT_PROSE.match(text):
                yield text


def load_windows(tokenizer: Any, tokens: int, seed: int) -> list[list[int]]:
    """`tokens` token ids in windows of 512 (the last one shorter), one window per article.

    `seed` orders the articles. Each gives its beginning; once all have, a second pass takes their
    next 512 tokens, and so on. Raises DemoError when the text is missing or too short.
    """
    texts = list(articles(find_file(TEXT, "test", "test_data", DUMP)))
    random.Random(seed).shuffle(texts)
    return cut_windows((clean(text) for text in texts), tokenizer, tokens)


def cut_windows(texts: Iterator[str], tokenizer: Any, tokens: int) -> list[list[int]]:
    """The windows of `load_windows`; tokenises no more of `texts` than it needs."""
    windows: list[list[int]] = []
    rest: list[list[int]] = []  # what is left of each text after the windows taken so far
    wanted = tokens

    def take(ids: list[int]) -> None:
        nonlocal wanted
        if len(ids) < WINDOW or wanted == 0:
            return
        windows.append(ids[: min(WINDOW, wanted)])
        wanted -= len(windows[-1])
        rest.append(ids[WINDOW:])

    for text in texts:
        if wanted == 0:
            return windows
        take(tokenizer.encode(text).ids)
    while wanted and rest:
        previous, rest = rest, []
        for ids in previous:
            take(ids)
    if wanted:
        raise DemoError(f"--tokens {tokens}: the text has only {tokens - wanted} tokens")
    return windows
