"""Which encoding a text file has: its byte order mark, UTF-8 where all fits, else what its bytes look like.

The locale is never asked. What stays uncertain is refused with the candidates, because text that was read in
the wrong encoding trains a model on noise without a word.
"""

from __future__ import annotations

import codecs
import gzip
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from snugtune.errors import DataError, UsageError

_MARKS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (b"\x84\x31\x95\x33", "gb18030"),
)
_BLOCK_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 18
# The characters that everyday texts use most: they tell apart encodings in which all bytes have a meaning.
_CHINESE = frozenset(
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然"
    "家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把"
    "机十民第公此已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己制身果"
    "加西斯月话合回特代内信表化老给世位次度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系气题活尔"
    "更别打女变四神总何电数安少报才结反受目太量再感建务做接必场件计管期市直德资命山金指克许统区保至队形社便空决治展"
    "马科司五基眼书非则听白却界达光放强即像难且权思王象完设式色路记南品住告类求据程北边死张该交规万取拉格望觉术领共"
    "确传师观清今切院让识候带导争运差坏快慢买卖货装屏幕贵服务态度质量包装喜欢值错烂赞推荐棒失望满意便宜收京客店房餐味吃喝"
)
_TRADITIONAL = frozenset(
    "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過發後作裡用道行所然"
    "家種事成方多經麼去法學如都同現當沒動面起看定天分還進好小部其些主樣理心她本前開但因只從想實日軍者意無力它與長把"
    "機十民第公此已工使情明性知全三又關點正業外將兩高間由問很最重並物手應戰向頭文體政美相見被利什二等產或新己制身果"
    "加西斯月話合回特代內信表化老給世位次度門任常先海通教兒原東聲提立及比員解水名真論處走義各入幾口認條平系氣題活"
    "更別打女變四神總何電數安少報才結反受目太量再感建務做接必場件計管期市直資命山金指許統區保至隊形社便空決治展差壞快慢買賣貨裝貴服態度質喜歡"
)
_KOREAN = frozenset(
    "이다는에의을가고하지도로은한를기사어나리자아서시대인해그일들스으정수있게것라면제전부보여상주장원만과동요니거"
    "구오조러았었없않좋너무안습맛음네래세영화재말분모성적계위성관경문비내중신마라소우연유간행치심"
)
_RUSSIAN = frozenset("оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфОВПНСКМИТД")
_DASHES = "“”‘’„–—…«»€™®©°·• "


@dataclass(frozen=True)
class _Candidate:
    """A legacy encoding and how to tell that text in it is likely: a score of at most 1."""

    name: str
    score: Callable[[str], float]


def _share(text: str, wanted: Callable[[str], bool]) -> float:
    foreign = [sign for sign in text if sign > "\x7f"]
    return sum(map(wanted, foreign)) / len(foreign) if foreign else 0.0


def _common_of(common: frozenset[str], script: Callable[[str], bool]) -> Callable[[str], float]:
    """Half for signs of the script (or its punctuation), half for those that are used often."""

    def score(text: str) -> float:
        known = _share(text, lambda sign: script(sign) or _is_wide_punctuation(sign))
        inside = [sign for sign in text if script(sign)]
        often = sum(sign in common for sign in inside) / len(inside) if inside else 0.0
        return 0.5 * known**4 + 0.5 * min(1.0, often / 0.5)

    return score


def _is_wide_punctuation(sign: str) -> bool:
    return "\u3000" <= sign <= "\u303f" or "\uff00" <= sign <= "\uffef" or sign in _DASHES


def _is_han(sign: str) -> bool:
    return "\u4e00" <= sign <= "\u9fff"


def _is_kana(sign: str) -> bool:
    return "\u3040" <= sign <= "\u30ff"


def _japanese(text: str) -> float:
    known = _share(text, lambda sign: _is_kana(sign) or _is_han(sign) or _is_wide_punctuation(sign))
    return known**4 * min(1.0, _share(text, _is_kana) / 0.25)


def _western(text: str) -> float:
    """Letters with accents and typographic signs that stand alone between ASCII letters."""
    known = _share(text, lambda sign: sign in _DASHES or (sign.isalpha() and sign < "\u0180"))
    runs = re.findall(r"[^\x00-\x7f]+", text)
    alone = sum(len(run) == 1 for run in runs) / len(runs) if runs else 0.0
    return known**4 * alone


def _is_cyrillic(sign: str) -> bool:
    return "\u0400" <= sign <= "\u045f"


def _russian(text: str) -> float:
    known = _share(text, lambda sign: _is_cyrillic(sign) or sign in _DASHES)
    letters = [sign for sign in text if _is_cyrillic(sign)]
    often = sum(sign in _RUSSIAN for sign in letters) / len(letters) if letters else 0.0
    # A capital inside a word is a sign of the other Russian encoding, a Latin letter one of Western texts.
    odd = len(re.findall(r"[а-яё][А-ЯЁA-Za-z]|[A-Za-z][а-яёА-ЯЁ]", text)) / len(letters) if letters else 1.0
    return known**4 * often * max(0.0, 1 - 4 * odd)


_CANDIDATES = (
    _Candidate("gb18030", _common_of(_CHINESE, _is_han)),
    _Candidate("big5", _common_of(_TRADITIONAL, _is_han)),
    _Candidate("cp932", _japanese),
    _Candidate("euc_jp", _japanese),
    _Candidate("cp949", _common_of(_KOREAN, lambda sign: "\uac00" <= sign <= "\ud7a3")),
    _Candidate("cp1251", _russian),
    _Candidate("koi8-r", _russian),
    _Candidate("cp1252", _western),
)
_ENOUGH, _MARGIN = 0.55, 0.12
_SHOWN = {
    "utf-8": "UTF-8",
    "utf-8-sig": "UTF-8 with a byte order mark",
    "gb18030": "GB18030 (GBK)",
    "big5": "Big5",
}
_SHOWN |= {
    "cp932": "Shift-JIS (cp932)",
    "euc_jp": "EUC-JP",
    "cp949": "EUC-KR (cp949)",
    "cp1252": "Windows-1252",
}
_SHOWN |= {"cp1251": "Windows-1251", "koi8-r": "KOI8-R", "utf-16": "UTF-16", "utf-32": "UTF-32"}


def open_bytes(path: Path) -> IO[bytes]:
    """A file, or what is in it if it is gzipped."""
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def bytes_read(file: Any) -> int:
    """How many bytes of the file on disk have been read through what `open_bytes` opened."""
    return int(getattr(file, "fileobj", file).tell())


def show_encoding(name: str) -> str:
    """An encoding as people call it."""
    return _SHOWN.get(name, name.upper())


@dataclass(frozen=True)
class Encoding:
    """The encoding of a file.

    Args:
        name: Python's name of it.
        damaged: Whether single bytes do not fit it.
    """

    name: str
    damaged: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the fast readers understand the file as it is."""
        return not self.damaged and self.name in ("utf-8", "utf-8-sig")


def find_encoding(path: Path, *, wanted: str | None = None) -> Encoding:
    """The encoding of a text file.

    Args:
        path: The file, or its gzipped form.
        wanted: The encoding that a person named; None finds out.

    Raises:
        DataError: It is uncertain, or bytes do not fit it. Single damaged lines in UTF-8 are let through.
        UsageError: Python does not know the encoding that was named.
    """
    if wanted is not None:
        try:
            codecs.lookup(wanted)
        except LookupError as error:
            raise UsageError(
                f"data.encoding: there is no encoding {wanted!r}",
                why="Python does not know it",
                do="name one such as utf-8, gb18030, big5, cp1252, utf-16",
            ) from error
        return _whole(path, wanted)
    with open_bytes(path) as file:
        head = file.read(4096)
    marked = next((name for mark, name in _MARKS if head.startswith(mark)), None)
    if marked in ("utf-16", "utf-32"):
        return _whole(path, marked)
    if marked is not None:
        return Encoding(marked, _misfit(path, marked) is not None)
    if b"\0" in head and (wide := _wide(head)) is not None:
        return _whole(path, wide)
    if _misfit(path, "utf-8") is None:
        return Encoding("utf-8")
    return _legacy(path)


def _wide(head: bytes) -> str | None:
    """UTF-16 or UTF-32 without a mark: where the zero bytes of ASCII signs stand."""
    zeros = [head[start::4].count(0) for start in range(4)]
    quarter = max(1, len(head) // 4)
    if min(zeros[1:]) > 0.7 * quarter and zeros[0] < 0.1 * quarter:
        return "utf-32-le"
    if min(zeros[:3]) > 0.7 * quarter and zeros[3] < 0.1 * quarter:
        return "utf-32-be"
    odd, even = zeros[1] + zeros[3], zeros[0] + zeros[2]
    if odd > 4 * even and odd > 0.02 * len(head):
        return "utf-16-le"
    if even > 4 * odd and even > 0.02 * len(head):
        return "utf-16-be"
    return None


def _misfit(path: Path, encoding: str) -> int | None:
    """The offset of the first byte that does not fit an encoding; None if all do."""
    decoder = codecs.getincrementaldecoder(encoding)()
    done = 0
    with open_bytes(path) as file:
        while True:
            block = file.read(_BLOCK_BYTES)
            waiting = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return max(0, done - waiting + error.start)
            if not block:
                return None
            done += len(block)


def _whole(path: Path, encoding: str) -> Encoding:
    offset = _misfit(path, encoding)
    if offset is not None:
        raise _not_in(path, encoding, offset)
    return Encoding(encoding)


def _not_in(path: Path, encoding: str, offset: int, more: str = "") -> DataError:
    line, value = _place(path, offset)
    return DataError(
        f"{path} is not {show_encoding(encoding)}: line {line}, byte offset {offset} (0x{value:02x})",
        why=more
        or "it is damaged there, or was saved in another encoding (GBK, Windows-1252, UTF-16 and so on)",
        do="save it as UTF-8 (spreadsheets: CSV UTF-8; editors: save with encoding), or name its encoding "
        "with data.encoding",
    )


def _place(path: Path, offset: int) -> tuple[int, int]:
    """The line of a byte, and the byte."""
    line, left = 1, offset
    with open_bytes(path) as file:
        while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
            line += block.count(b"\n")
            left -= len(block)
        return line, (file.read(1) or b"\0")[0]


def foreign_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of the lines that are not all ASCII."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isascii():
                yield number, line


def _legacy(path: Path) -> Encoding:
    """The encoding of a file that is not UTF-8: UTF-8 with a few damaged lines, or the likeliest other."""
    sample, fits = _sample(path)
    if fits["yes"] > 9 * fits["no"] + 1:
        return Encoding("utf-8", damaged=True)
    scores = []
    for candidate in _CANDIDATES:
        try:
            text = sample.decode(candidate.name)
        except UnicodeDecodeError:
            continue
        scores.append((candidate.score(text), candidate.name))
    scores.sort(reverse=True)
    offset = _misfit(path, "utf-8") or 0
    likely = [(score, name) for score, name in scores if score >= _ENOUGH]
    if not likely:
        raise _not_in(path, "utf-8", offset)
    if len(likely) > 1 and likely[0][0] - likely[1][0] < _MARGIN:
        names = " or ".join(show_encoding(name) for _, name in likely[:2])
        raise _not_in(path, "utf-8", offset, f"it could be {names}; there is too little text to tell")
    return _whole(path, likely[0][1])


def _sample(path: Path) -> tuple[bytes, Counter[str]]:
    """Lines that are not ASCII, and how many of them are UTF-8."""
    sample, fits = bytearray(), Counter[str]()
    for _, line in foreign_lines(path):
        try:
            line.decode()
            fits["yes"] += 1
        except UnicodeDecodeError:
            fits["no"] += 1
            sample += line
            if len(sample) > _SAMPLE_BYTES:
                break
    return bytes(sample), fits
