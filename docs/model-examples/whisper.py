"""Speech to text by Whisper, on faster-whisper: a recording in, the text and its segments with their times out."""

import hashlib
import os

import av
import numpy
import vramq
from faster_whisper import WhisperModel

# Samples a second of what Whisper hears.
RATE = 16_000
# The longest recording. Some files are small and hours of silence: this is what decoding one may take of the host's memory.
SECONDS_MAX = 4 * 3600
# What files may be. FFmpeg reads playlists, too, and those name other files and addresses for it to open.
FORMATS = "wav,w64,aiff,flac,mp3,aac,ogg,mov,matroska,caf"


class Whisper(vramq.Model):
    accepts = ["bytes"]

    def load(self, device):
        folder = os.environ["MODEL"]
        # "cuda:0" is the only GPU that this process sees. Two threads: of the CPU's, others have the rest.
        self.model = WhisperModel(
            folder, device=device.partition(":")[0], compute_type=os.environ.get("COMPUTE_TYPE", "default"),
            cpu_threads=int(os.environ.get("THREADS", "2")), local_files_only=True,
        )
        digest = hashlib.sha256()
        with open(os.path.join(folder, "model.bin"), "rb") as file:
            for part in iter(lambda: file.read(1 << 20), b""):
                digest.update(part)
        self.revision = f"whisper-{digest.hexdigest()[:16]}-{self.model.model.compute_type}"

    def run(self, items, params):
        language = params.get("language")
        if language not in (None, *self.model.supported_languages):
            raise vramq.InvalidInput(f"params.language is {language!r}, which the model does not have")
        for item in items:
            yield self.text_of(item, samples_of(item), language)

    def text_of(self, item, samples, language):
        # It computes a segment when it is asked for the next one. What the voice detector finds silent, Whisper does not hear:
        # it would make sentences up.
        segments, info = self.model.transcribe(samples, language=language, vad_filter=True)
        found = []
        for segment in segments:
            found.append({"from_s": segment.start, "to_s": segment.end, "text": segment.text.strip()})
            self.progress(item, segment.end / info.duration, found[-1]["text"])
        self.progress(item, 1.0)
        return {
            "text": " ".join(segment["text"] for segment in found),
            "language": info.language,
            "seconds": info.duration,
            "segments": found,
        }


def samples_of(item):
    """The sound of a file as Whisper hears it: one channel of `f32` samples."""
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    parts, seconds = [], 0.0
    try:
        with av.open(item.path, options={"format_whitelist": FORMATS}, metadata_errors="ignore") as file:
            if not file.streams.audio:
                raise vramq.InvalidInput("the file has no sound", item)
            for decoded in file.decode(audio=0):
                decoded.pts = None
                for frame in resampler.resample(decoded):
                    parts.append(frame.to_ndarray()[0])
                    seconds += frame.samples / RATE
                if seconds > SECONDS_MAX:
                    raise vramq.InvalidInput(f"a recording of more than {SECONDS_MAX} s", item)
            parts += [frame.to_ndarray()[0] for frame in resampler.resample(None)]
    except av.FFmpegError as error:
        raise vramq.InvalidInput(f"no recording that can be read: {error.strerror}", item)
    if not seconds:
        raise vramq.InvalidInput("the file has no sound", item)
    return numpy.concatenate(parts)


vramq.serve(Whisper)
