// A memset of a few words, as a kernel.
extern "C" __global__ void fill_words(unsigned* words, unsigned value, int count) {
  for (int i = threadIdx.x; i < count; i += TW_THREADS) words[i] = value;
}
