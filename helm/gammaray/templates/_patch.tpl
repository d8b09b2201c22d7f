{{/*
A value with a patch, as JSON of {"value": ...}: (dict "old" value "new" patch "field" name). Maps are merged, lists of named
entries by name (volumeMounts by mountPath), other lists replaced; null removes a field.
*/}}
{{- define "gammaray.patched" -}}
{{- $result := .new -}}
{{- $id := ternary "mountPath" "name" (eq .field "volumeMounts") -}}
{{- if kindIs "map" .new -}}
{{- $result = kindIs "map" .old | ternary .old dict -}}
{{- range $key, $new := .new -}}
{{- if kindIs "invalid" $new -}}
{{- $_ := unset $result $key -}}
{{- else -}}
{{- $value := include "gammaray.patched" (dict "old" (get $result $key) "new" $new "field" $key) | fromJson -}}
{{- $_ := set $result $key $value.value -}}
{{- end -}}
{{- end -}}
{{- else if and (kindIs "slice" .new) (kindIs "slice" .old) (include "gammaray.haveKey" (dict "entries" .new "key" $id)) -}}
{{- $result = list -}}
{{- $given := dict -}}
{{- range .new -}}
{{- $_ := set $given (get . $id) . -}}
{{- end -}}
{{- range .old -}}
{{- $value := include "gammaray.patched" (dict "old" . "new" (get $given (get . $id) | default dict) "field" "") | fromJson -}}
{{- $result = append $result $value.value -}}
{{- $_ := unset $given (get . $id) -}}
{{- end -}}
{{- range .new -}}
{{- if hasKey $given (get . $id) -}}
{{- $result = append $result . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "value" $result) -}}
{{- end -}}

{{/* "true" if all entries of a list are maps with a key: (dict "entries" list "key" name). */}}
{{- define "gammaray.haveKey" -}}
{{- $all := true -}}
{{- range .entries -}}
{{- $all = and $all (kindIs "map" .) (hasKey (kindIs "map" . | ternary . dict) $.key) -}}
{{- end -}}
{{- ternary "true" "" $all -}}
{{- end -}}

{{/* A pod with the `patch` of its values: (dict "root" $ "component" name "pod" its metadata and spec as YAML). */}}
{{- define "gammaray.patchedPod" -}}
{{- $patch := (include "gammaray.podValues" . | fromYaml).patch -}}
{{- if $patch -}}
{{- $component := .component -}}
{{- $pod := .pod | fromYaml -}}
{{- range dig "spec" "containers" list $patch -}}
{{- if not .name -}}
{{- $_ := set . "name" (first $pod.spec.containers).name -}}
{{- end -}}
{{- end -}}
{{- $value := (include "gammaray.patched" (dict "old" $pod "new" $patch "field" "") | fromJson).value -}}
{{- range concat $value.spec.containers ($value.spec.initContainers | default list) -}}
{{- if not .image -}}
{{- fail (printf "patch: the pod %q has no container %q; one without a name stands for the chart's own" $component .name) -}}
{{- end -}}
{{- end -}}
{{- toYaml $value -}}
{{- else -}}
{{- .pod -}}
{{- end -}}
{{- end -}}
