"""The page at /: self-contained, and allowed to run nothing but itself."""

import base64
import hashlib
import re

from gammaray.types import DrafterKind, TokenOrigin
from tests.support.http_helpers import call
from tests.support.surface_helpers import ScriptedBackend

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def page():
    return await call(ScriptedBackend(), "GET", "/", headers=BROWSER)


async def test_browsers_get_the_page_and_others_json():
    answer = await page()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>gammaray playground</title>" in answer.text
    assert (await call(ScriptedBackend(), "GET", "/")).json()["name"] == "gammaray"


async def test_page_refers_to_nothing_outside():
    text = (await page()).text
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?!data:)", text) == []


async def test_policy_names_the_hash_of_each_inline_block():
    answer = await page()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    blocks = re.findall(r"<(?:script|style)>(.*?)</", answer.text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() in policy
    assert re.findall(r"<[^>]+\s(?:on\w+|style)=", answer.text) == [], "the policy forbids them"


async def test_every_drafter_and_origin_has_a_colour_in_both_schemes_and_a_name_for_the_legend():
    text = (await page()).text
    names = dict(re.findall(r'(\w+): "([^"]+)"', re.search(r"const NAMES = {(.*?)};", text, re.DOTALL)[1]))
    drafters = [kind.value for kind in DrafterKind if kind is not DrafterKind.NONE]
    assert list(names) == drafters
    for source in [*drafters, *(origin.value for origin in TokenOrigin)]:
        assert text.count(f"--{source}: #") == 2, source
        assert f".{source} {{ background: var(--{source}); }}" in text
