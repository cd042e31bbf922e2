"""Names of pages: a hash chained over everything that decides a page's contents.

root  = H(format, model identity, page size, salt)
key_0 = H(root,  tokens of page 0)
key_1 = H(key_0, tokens of page 1)      so equal keys mean equal whole prefixes
"""

from hashlib import sha256

from mainstem.core.ids import PageKey
from mainstem.core.step import Int32s

FORMAT = b"mainstem page 1"


def root_key(identity: bytes, page_size: int, salt: bytes) -> PageKey:
    """The key before the first page. `identity` covers weights, dtype, rope and page layout."""
    digest = sha256(FORMAT)
    for part in (identity, page_size.to_bytes(4, "little"), salt):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return PageKey(digest.digest())


def page_keys(previous: PageKey, token_ids: Int32s, page_size: int) -> list[PageKey]:
    """Keys of the full pages of `token_ids`, continuing the chain from `previous`."""
    raw = memoryview(token_ids.tobytes())
    width = page_size * token_ids.itemsize
    keys: list[PageKey] = []
    for start in range(0, len(raw) - width + 1, width):
        digest = sha256(previous)
        digest.update(raw[start : start + width])
        previous = PageKey(digest.digest())
        keys.append(previous)
    return keys
