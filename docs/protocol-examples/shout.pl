#!/usr/bin/perl
# A model in Perl, without an SDK: answers each text in capitals. The protocol is docs/process-protocol.md.
use strict;
use warnings;
use Encode qw(decode);
use IO::Handle;
use JSON::PP;

my $json = JSON::PP->new->utf8->allow_nonref;
open(my $in, '<&=', $ENV{VRAMQ_FD}) && open(my $out, '>&=', $ENV{VRAMQ_FD}) or die "VRAMQ_FD: $!";
binmode($_) for $in, $out;
$out->autoflush(1);

sub read_bytes {
    my ($length) = @_;
    (read($in, my $bytes, $length) // -1) == $length or exit 0;    # The worker is gone.
    return $bytes;
}

sub send_frame {
    my ($header, @blobs) = @_;
    my $text = $json->encode({%$header, blobs => [map { length } @blobs]});
    print {$out} pack('V', length $text), $text, @blobs;
}

while (1) {
    my $header = $json->decode(read_bytes(unpack('V', read_bytes(4))));
    my ($type, @blobs) = ($header->{type}, map { read_bytes($_) } @{$header->{blobs} // []});
    exit 0 if $type eq 'shutdown';
    send_frame({type => 'ready', version => 1, accepts => ['text']}) if $type eq 'hello';
    send_frame({type => 'pong', number => $header->{number}}) if $type eq 'ping';
    next if $type ne 'run';
    for my $item (0 .. $#blobs) {
        my $file = $header->{items}[$item]{file};    # Where a text is that is too large for the frame.
        my $bytes = $file ? do { local (@ARGV, $/) = "$ENV{VRAMQ_SCRATCH}/$file"; <> } : $blobs[$item];
        my $output = $json->encode(uc(decode('UTF-8', $bytes)));
        send_frame({type => 'output', pass => $header->{pass}, item => $item, kind => 'json'}, $output);
    }
    send_frame({type => 'done', pass => $header->{pass}});
}
