"""The pure core: decides what to write, ask and read, and does none of it.

No I/O, no asyncio, no Mooncake, no torch. Inside: results > plans > prefix >
masks, keys, sequence, framing, presets > layout, hashing.
"""
