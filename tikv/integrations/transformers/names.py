"""The names that users know: of the attention, and of what an error comes from."""

ATTENTION = "tikv"  # for attn_implementation
IN_PAGES = "tikv_pages"  # that of the attention while a manager of continuous batching runs

ATTENTION_CALL = f'attention "{ATTENTION}"'
CACHE = "TikvCache"
PAGES = "transformers.pages"
