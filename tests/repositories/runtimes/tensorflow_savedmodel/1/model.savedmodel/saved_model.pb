Û
÷É
D
AddV2
x"T
y"T
z"T"
Ttype:
2	€
C
Placeholder
output"dtype"
dtypetype"
shapeshape:
<
Sub
x"T
y"T
z"T"
Ttype:
2	"serve*2.21.02v2.21.0-rc1-5-ga481b10260dâ
d
APlaceholder*'
_output_shapes
:ÿÿÿÿÿÿÿÿÿ*
dtype0*
shape:ÿÿÿÿÿÿÿÿÿ
d
BPlaceholder*'
_output_shapes
:ÿÿÿÿÿÿÿÿÿ*
dtype0*
shape:ÿÿÿÿÿÿÿÿÿ
D
SUMAddV2AB*
T0*'
_output_shapes
:ÿÿÿÿÿÿÿÿÿ
I

DIFFERENCESubAB*
T0*'
_output_shapes
:ÿÿÿÿÿÿÿÿÿ"ª*z
serving_defaultg

A
A:0ÿÿÿÿÿÿÿÿÿ

B
B:0ÿÿÿÿÿÿÿÿÿ#
SUM
SUM:0ÿÿÿÿÿÿÿÿÿ