"""Speech to text by PocketSphinx, with the model of US English that its package brings: WAV in, the text and its words' times out."""

import io
import wave
from importlib.metadata import version

import pocketsphinx
import vramq

# Samples a second of the speech that the model was trained with.
RATE = 16_000
# Half a minute of 16-bit samples: from so many the decoder learns how a recording sounds.
SOUND_BYTES = 30 * RATE * 2
# Half a second. After each the caller sees what was understood so far.
STEP_BYTES = RATE // 2 * 2
# What is shown of it at a time: the last words.
SHOWN_CHARACTERS = 80
# The decoder's frames, in which it counts time.
FRAMES_A_SECOND = 100


class Speech(vramq.Model):
    accepts = ["bytes"]
    revision = f"pocketsphinx-{version('pocketsphinx')}-en-us"

    def load(self, device):
        # PocketSphinx computes on the CPU, whatever the device.
        self.decoder = pocketsphinx.Decoder(samprate=RATE, loglevel="ERROR")
        self.cmn = self.decoder.get_cmn()

    def run(self, items, params):
        for item in items:
            yield self.text_of(item, samples_of(item))

    def text_of(self, item, samples):
        self.get_used_to(samples[:SOUND_BYTES])
        self.decoder.start_utt()
        try:
            for at in range(0, len(samples), STEP_BYTES):
                step = samples[at:at + STEP_BYTES]
                self.decoder.process_raw(step)
                best = self.decoder.hyp()
                self.progress(item, (at + len(step)) / len(samples), best.hypstr[-SHOWN_CHARACTERS:] if best else "")
        finally:
            # Also of a pass that was cancelled: `progress` raises then.
            self.decoder.end_utt()
        best = self.decoder.hyp()
        return {
            "text": best.hypstr if best else "",
            "words": [
                {
                    # The dictionary's second pronunciation of a word is its word with (2).
                    "word": word.word.partition("(")[0],
                    "from_s": word.start_frame / FRAMES_A_SECOND,
                    "to_s": (word.end_frame + 1) / FRAMES_A_SECOND,
                }
                for word in self.decoder.seg() or ()
                # Others are silence and noise.
                if word.word[0] not in "<["
            ],
        }

    def get_used_to(self, samples):
        """Sets the mean of the features, which is the microphone's and the room's. Else it would be that of the items before."""
        self.decoder.set_cmn(self.cmn)
        self.decoder.start_utt()
        self.decoder.process_raw(samples, no_search=True)
        self.decoder.end_utt()
        self.decoder.set_cmn(self.decoder.get_cmn(True))


def samples_of(item):
    """The samples of a WAV file, 16-bit, as one run of bytes."""
    try:
        with wave.open(io.BytesIO(item.bytes)) as file:
            found = (file.getframerate(), file.getnchannels(), file.getsampwidth())
            samples = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise vramq.InvalidInput(f"no WAV file: {str(error) or 'it ends too early'}", item)
    if found != (RATE, 1, 2):
        rate, channels, width = found
        raise vramq.InvalidInput(
            f"{rate} Hz, {channels} channels, {8 * width} bits; the model takes {RATE} Hz, one channel, 16 bits "
            "(ffmpeg -i INPUT -ar 16000 -ac 1 -c:a pcm_s16le OUTPUT.wav)", item,
        )
    if not samples:
        raise vramq.InvalidInput("a WAV file without samples", item)
    return samples


vramq.serve(Speech)
