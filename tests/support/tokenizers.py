"""Tokenizers as other projects train them, with their libraries and their settings, and text that is hard for a tokenizer."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
VOCABULARY = 400


def mixed_text(rng: random.Random, words: int) -> str:
    """English, code, CJK, emoji, combining marks, control characters, special tokens spelt out, and U+FFFD for broken UTF-8."""
    vocabulary = [
        "The",
        "lane",
        "reads",
        "units,",
        "it's",
        "don't",
        "I'LL",
        "1234567",
        "3.14",
        "def f(self):",
        "return x[1:]",
        "==>",
    ]
    vocabulary += [
        "語学",
        "日本語のテキスト",
        "한국어",
        "Привет",
        "naïve",
        "e\u0301te\u0301",
        "ﬁne",
        "Ⅷ",
        "👩‍👩‍👧",
        "🤖🚀",
        "العربية",
        "ẞ",
    ]
    vocabulary += ["<|endoftext|>", "</s>", "<s>", "[SEP]", "[UNK]", "<unk>", "<doc>", "<0x0A>", "\u2581", "▁▁x", "\ufeff", "\0"]
    vocabulary += [b"\xf0\x9f\x98 \xff\xfe\xc3(".decode(errors="replace"), "#!?...", "x" * 150, "\u200b", "\u0130"]
    separators = [" "] * 12 + ["\n", "\n    ", "\t", "  ", "\n\n", "\r\n", "", "\u00a0", "\u3000", " \n ", "        "]
    return "".join(rng.choice(vocabulary) + rng.choice(separators) for _ in range(words))


def _texts() -> list[str]:
    rng = random.Random(11)
    texts = [mixed_text(rng, 60) for _ in range(60)]
    return [text.replace("</s>", "").replace("<s>", "") for text in texts]  # else BPE without words would learn to spell them


def gpt_neox(path: Path) -> None:
    """As EleutherAI's: NFC, GPT-2's words without a space in front, runs of spaces as added tokens."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.NFC()
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    trained.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    trained.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=True)
    special = ["<|endoftext|>", "<|padding|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(_texts(), trainer)
    trained.add_tokens([AddedToken(" " * count, normalized=True) for count in range(24, 1, -1)])
    trained.save(str(path))


def llama_3(path: Path) -> None:
    """As Meta's: GPT-4's words, merges ignored for whole words, a document beginning in front, and <|end_of_text|>."""
    trained = Tokenizer(models.BPE(ignore_merges=True))
    words = pre_tokenizers.Split(Regex(LLAMA_3), behavior="isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trained.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(_texts(), trainer)
    begin = "<|begin_of_text|>"
    trained.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, trained.token_to_id(begin))]
    )
    trained.save(str(path))


def mistral(path: Path) -> None:
    """As Llama 2's and Mistral's: SentencePiece BPE with a space in front, byte fallback, no normalisation, <s> and </s>; and
    symbols, one of them of newlines."""
    sentencepiece_model(
        path,
        model_type="bpe",
        vocab_size=VOCABULARY + 260,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.99,
        user_defined_symbols=["[SEP]", "==>", "\n\n"],
    )


def unigram(path: Path) -> None:
    """SentencePiece as it is without settings: Unigram, NFKC, spaces made one, no byte fallback; and two symbols."""
    sentencepiece_model(path, vocab_size=120, character_coverage=0.98, user_defined_symbols=["def f", "\n"])


def sentencepiece_model(path: Path, **settings: object) -> None:
    model = io.BytesIO()
    sentences = (line for text in _texts() for line in text.replace("\0", "").split("\n"))
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, minloglevel=2, **settings)
    path.write_bytes(model.getvalue())


def wordpiece(path: Path) -> None:
    """As BERT's: lower case, accents stripped, [UNK], ## inside words."""
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizers.BertNormalizer(lowercase=True)
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trained.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special, limit_alphabet=90, show_progress=False)
    trained.train_from_iterator(_texts(), trainer)
    trained.save(str(path))


def llama_2_json(path: Path) -> None:
    """As transformers converts Llama 2's: byte fallback, the space in front as a normalisation, no words."""
    trained = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY + 260, special_tokens=special, show_progress=False, limit_alphabet=60)
    trained.train_from_iterator(_texts(), trainer)
    trained.pre_tokenizer = None
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    trained.decoder = decoders.Sequence(steps)
    spec = json.loads(trained.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    path.write_text(json.dumps(spec))


MAKERS: dict[str, tuple[Callable[[Path], None], str, str | None]] = {
    "gpt-neox": (gpt_neox, "tokenizer.json", None),
    "llama-3": (llama_3, "tokenizer.json", None),
    "mistral": (mistral, "tokenizer.model", None),
    "wordpiece": (wordpiece, "tokenizer.json", "[SEP]"),
    "unigram": (unigram, "tokenizer.model", None),
    "llama-2-json": (llama_2_json, "tokenizer.json", None),
}
"""How each is trained, the name of its file, and its EOD token where it has to be named."""
